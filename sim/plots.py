"""Pictures of runs. Needs matplotlib (the bench extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.common.clock import NS_PER_S
from isthmus.sim.records import Record
from isthmus.sim.report import verdict
from isthmus.sim.run import Probe
from isthmus.workload.plots import draw_cumulative, new_figure

_COLOURS = {
    "good": "tab:green",
    "late_ttft": "tab:orange",
    "late_tpot": "tab:purple",
    "both": "tab:red",
    "rejected": "tab:gray",
}
_OTHER = "black"


def plot_run(path: Path, records: Sequence[Record]) -> None:
    """Every request over time, by what became of it, and how TTFT and TPOT are spread."""
    figure, (over_time, ttft, tpot) = new_figure(3)
    groups: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        point = (record.request.arrival_ns / NS_PER_S, (record.ttft_ms or 0.0) / 1e3)
        groups.setdefault(verdict(record), []).append(point)
    for name, points in groups.items():
        x, y = zip(*points, strict=True)
        colour = _COLOURS.get(name, _OTHER)
        over_time.scatter(x, y, s=4, color=colour, label=f"{name} ({len(points)})")
    over_time.set(xlabel="arrival (s)", ylabel="TTFT (s); refused at 0")
    over_time.legend(fontsize=7)
    share = "share of requests"
    draw_cumulative(ttft, [record.ttft_ms for record in records], "TTFT (ms)", share)
    draw_cumulative(tpot, [record.tpot_ms for record in records], "TPOT (ms)", share)
    figure.savefig(path, dpi=130)


def plot_rates(path: Path, series: Mapping[str, Sequence[Probe]], asked: float) -> None:
    """Attainment and goodput over the offered rate, one line a name."""
    figure, (attainment, goodput) = new_figure(2)
    for name, probes in series.items():
        ordered = sorted(probes, key=lambda probe: probe.rate)
        rates = [probe.rate for probe in ordered]
        attainment.plot(rates, [probe.attainment for probe in ordered], "o-", label=name)
        goodput.plot(rates, [probe.goodput for probe in ordered], "o-", label=name)
    attainment.axhline(asked, color="gray", linestyle=":", label=f"asked: {asked:g}")
    attainment.set(xlabel="offered (requests/s)", ylabel="all targets met", ylim=(0, 1.03))
    goodput.set(xlabel="offered (requests/s)", ylabel="goodput (requests/s)")
    for panel in (attainment, goodput):
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=130)
