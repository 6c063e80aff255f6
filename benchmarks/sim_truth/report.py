"""Live and simulated figures of each rate, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.loadgen import Summary
from isthmus.sim import SimReport
from isthmus.sim.report import ClassReport
from isthmus.workload.figures import written

HEADS = ("TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "gap p50")


@dataclass(frozen=True, slots=True)
class Pair:
    """One rate. ``foreign_cpu``: of other processes meanwhile, as a share of one core."""

    rate: float
    live: Summary
    simulated: SimReport
    foreign_cpu: float

    @property
    def error(self) -> float:
        """Of the goodput that was predicted, as a share of what was measured."""
        return self.simulated.total.goodput / max(self.live.goodput, 1e-9) - 1.0


def table(pairs: Sequence[Pair]) -> str:
    names = "rate", "", "goodput", "error", "good", *HEADS
    lines = [f"| {' | '.join(names)} |", "| ---: | --- |" + " ---: |" * (len(names) - 2)]
    for pair in pairs:
        foreign = f"foreign CPU {pair.foreign_cpu:.0%}"
        lines.append(_row(f"{pair.rate:g}/s", f"live, {foreign}", pair.live, ""))
        lines.append(_row("", "simulated", pair.simulated.total, f"{pair.error:+.1%}"))
    return "\n".join(lines) + "\n"


def _row(rate: str, name: str, item: Summary | ClassReport, error: str) -> str:
    ttft, tpot = item.ttft, item.tpot
    return (
        f"| {rate} | {name} | {item.goodput:.3f}/s | {error} | {item.attainment:.1%} "
        f"| {written(ttft.p50)} | {written(ttft.p90)} | {written(ttft.p99)} "
        f"| {written(tpot.p50, 1)} | {written(tpot.p90, 1)} | {written(tpot.p99, 1)} "
        f"| {written(item.second_token_gap.p50)} |"
    )
