"""Pictures of a run and of several rates. Needs matplotlib (the bench extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.common.errors import ConfigError
from isthmus.loadgen.summary import Summary
from isthmus.loadgen.types import Record, Targets, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    Verdict.GOOD: "tab:green",
    Verdict.LATE_TTFT: "tab:orange",
    Verdict.LATE_TPOT: "tab:purple",
    Verdict.LATE_BOTH: "tab:red",
    Verdict.REJECTED: "tab:gray",
    Verdict.ERROR: "black",
    Verdict.TIMEOUT: "tab:brown",
}


def plot_run(path: Path, records: Sequence[Record], targets: Targets) -> None:
    """Each call over time, coloured by its verdict, and how TTFT and TPOT are spread."""
    figure, panels = _figure(3)
    over_time, ttft, tpot = panels
    for verdict, colour in _COLOURS.items():
        chosen = [r for r in records if r.verdict(targets) is verdict]
        points = [(r.call.due_s, r.ttft_ms or 0.0) for r in chosen]
        if points:
            x, y = zip(*points, strict=True)
            over_time.scatter(x, y, s=10, color=colour, label=f"{verdict.value} ({len(chosen)})")
    over_time.set(xlabel="due (s)", ylabel="TTFT (ms); refused calls at 0")
    over_time.legend(fontsize=7)
    _cumulative(ttft, [r.ttft_ms for r in records], targets.ttft_ms, "TTFT (ms)")
    _cumulative(tpot, [r.tpot_ms for r in records], targets.tpot_ms, "TPOT (ms)")
    figure.savefig(path, dpi=130)


def plot_rates(path: Path, series: dict[str, Sequence[Summary]], asked: float) -> None:
    """Attainment and goodput over the offered rate, one line for each name in ``series``."""
    figure, (attainment, goodput) = _figure(2)
    highest = 0.0
    for name, summaries in series.items():
        ordered = sorted(summaries, key=lambda summary: summary.offered_rate)
        rates = [summary.offered_rate for summary in ordered]
        attainment.plot(rates, [summary.attainment for summary in ordered], "o-", label=name)
        goodput.plot(rates, [summary.goodput for summary in ordered], "o-", label=name)
        highest = max([highest, *rates])
    attainment.axhline(asked, color="gray", linestyle=":", label=f"asked: {asked:g}")
    goodput.plot([0, highest], [0, highest], color="gray", linestyle=":", label="all of it")
    attainment.set(xlabel="offered (requests/s)", ylabel="both targets met", ylim=(0, 1.03))
    goodput.set(xlabel="offered (requests/s)", ylabel="goodput (requests/s)")
    for panel in (attainment, goodput):
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def _cumulative(
    panel: Axes, values: Sequence[float | None], limit: float | None, label: str
) -> None:
    known = sorted(value for value in values if value is not None)
    if known:
        shares = [(place + 1) / len(known) for place in range(len(known))]
        panel.step(known, shares, where="post")
    if limit is not None:
        panel.axvline(limit, color="gray", linestyle=":", label=f"target {limit:g}")
        panel.legend(fontsize=7)
    panel.set(xlabel=label, ylabel="share of calls", ylim=(0, 1.03))


def _figure(num_panels: int) -> tuple[Any, Any]:
    try:
        import matplotlib as mpl
    except ImportError as missing:
        raise ConfigError(
            "a plot needs matplotlib: pip install 'isthmus[bench]'", stage="bench"
        ) from missing
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, num_panels, figsize=(5 * num_panels, 4), layout="constrained")
    return figure, panels
