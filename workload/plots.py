"""What pictures of runs have in common, live and simulated. Needs matplotlib (the bench extra)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isthmus.common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def new_figure(num_panels: int) -> tuple[Any, Any]:
    """A figure and its panels, side by side. Raises ConfigError without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError as missing:
        raise ConfigError(
            "a plot needs matplotlib: pip install 'isthmus[bench]'", stage="bench"
        ) from missing
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    made: tuple[Any, Any] = plt.subplots(
        1, num_panels, figsize=(5 * num_panels, 4), layout="constrained"
    )
    return made


def draw_cumulative(panel: Axes, values: Sequence[float | None], xlabel: str, ylabel: str) -> None:
    """The share of the known values that is at most x."""
    known = sorted(value for value in values if value is not None)
    if known:
        shares = [(place + 1) / len(known) for place in range(len(known))]
        panel.step(known, shares, where="post")
    panel.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.03))
