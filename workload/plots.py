"""What pictures of runs have in common, live and simulated. Needs matplotlib (the bench extra)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from isthmus.common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_plots() -> None:
    """To be asked before a run whose picture is wanted. Raises ConfigError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'isthmus[bench]'", stage="bench")


def new_figure(
    num_panels: int, *, panel_inches: tuple[float, float] = (5, 4), shares_y: bool = False
) -> tuple[Any, list[Any]]:
    """A figure and its panels, side by side. It belongs to its caller alone: nothing has to be
    closed. Raises ConfigError without matplotlib."""
    require_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = panel_inches
    figure = Figure(figsize=(width * num_panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, num_panels, squeeze=False, sharey=shares_y)[0]
    return figure, list(panels)


def draw_cumulative(panel: Axes, values: Sequence[float | None], xlabel: str, ylabel: str) -> None:
    """The share of the known values that is at most x."""
    known = sorted(value for value in values if value is not None)
    if known:
        shares = [(place + 1) / len(known) for place in range(len(known))]
        panel.step(known, shares, where="post")
    panel.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.03))
