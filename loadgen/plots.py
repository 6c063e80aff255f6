"""Pictures of a run and of several rates. Needs matplotlib (the bench extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.loadgen.summary import Summary
from isthmus.loadgen.types import Record, Targets, Verdict
from isthmus.workload.plots import draw_cumulative, new_figure

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
    figure, panels = new_figure(3)
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
    figure, (attainment, goodput) = new_figure(2)
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
    draw_cumulative(panel, values, label, "share of calls")
    if limit is not None:
        panel.axvline(limit, color="gray", linestyle=":", label=f"target {limit:g}")
        panel.legend(fontsize=7)
