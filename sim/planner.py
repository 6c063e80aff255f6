"""Which cluster gives most goodput per GPU? Tries shapes in the simulator.

A shape is a number of instances of each role and the GPUs (tensor parallelism) of one. Every shape
that fits the budget is a candidate; its worth is the highest rate at which enough requests are good
(``sim.run.search_goodput``), divided by its GPUs. So that not every candidate costs a whole search,
each is first tried at the rate at which it would be nearly as good as the best so far: one that
fails there is ruled out by that single run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from isthmus.common.cluster import Role
from isthmus.common.errors import ConfigError
from isthmus.sim.build import make_calls
from isthmus.sim.report import SimReport
from isthmus.sim.run import Probe, run_scenario, scenario_wait_s, search_goodput
from isthmus.sim.scenario import PoolPart, Scenario
from isthmus.workload import Call, at_rate


@dataclass(frozen=True, slots=True)
class Shape:
    """0 instances of a role: it has no pool."""

    prefills: int = 0
    decodes: int = 0
    mixed: int = 0
    prefill_tp: int = 1
    decode_tp: int = 1
    mixed_tp: int = 1

    @property
    def num_gpus(self) -> int:
        return (
            self.prefills * self.prefill_tp
            + self.decodes * self.decode_tp
            + self.mixed * self.mixed_tp
        )

    def __str__(self) -> str:
        parts = [
            f"{count} {role} × TP {tp}"
            for role, count, tp in (
                ("prefill", self.prefills, self.prefill_tp),
                ("decode", self.decodes, self.decode_tp),
                ("mixed", self.mixed, self.mixed_tp),
            )
            if count
        ]
        return " + ".join(parts)


@dataclass(frozen=True, slots=True)
class Budget:
    """``tps``: sizes that are tried. ``num_gpus``: at most; with ``must_fill`` exactly."""

    num_gpus: int
    tps: tuple[int, ...] = (1,)
    with_mixed: bool = True
    with_pairs: bool = True
    must_fill: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """``rate``: the highest that attains enough (0 = none does); ``limit``: what keeps it there."""

    shape: Shape
    rate: float
    goodput_per_gpu: float
    attainment: float
    limit: str
    probes: tuple[Probe, ...]
    is_capped: bool

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "name": str(self.shape), "num_gpus": self.shape.num_gpus}


@dataclass(frozen=True, slots=True)
class Plan:
    """Best first. ``ruled_out``: shapes that were found to be worth less per GPU than this.
    ``skipped``: shapes whose model does not fit, and why."""

    asked: float
    tolerance: float
    candidates: tuple[Candidate, ...]
    ruled_out: dict[str, float]
    skipped: dict[str, str]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def ties(self) -> tuple[Candidate, ...]:
        """The others that are as good as the best, as far as rates were found exactly."""
        least = self.best.goodput_per_gpu * (1 - self.tolerance)
        return tuple(item for item in self.candidates[1:] if item.goodput_per_gpu >= least)

    def as_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "ties": [str(item.shape) for item in self.ties],
            "candidates": [candidate.as_json() for candidate in self.candidates],
            "ruled_out": self.ruled_out,
            "skipped": self.skipped,
        }


def shapes(budget: Budget) -> Iterator[Shape]:
    """All that fit: pairs of pools, then mixed pools; the smaller first."""
    limit = budget.num_gpus
    found = []
    if budget.with_pairs:
        for prefill_tp, decode_tp in product(budget.tps, budget.tps):
            for prefills in range(1, limit // prefill_tp + 1):
                most = (limit - prefills * prefill_tp) // decode_tp
                found += [
                    Shape(prefills, decodes, 0, prefill_tp, decode_tp)
                    for decodes in range(1, most + 1)
                ]
    if budget.with_mixed:
        for tp in budget.tps:
            found += [Shape(mixed=count, mixed_tp=tp) for count in range(1, limit // tp + 1)]
    for shape in sorted(found, key=lambda item: item.num_gpus):
        if shape.num_gpus == limit or not budget.must_fill:
            yield shape


def with_shape(scenario: Scenario, shape: Shape) -> Scenario:
    """The scenario's pools, resized. A role takes the scenario's first pool of that role for its
    pattern, or else the first of any."""
    pools = [
        _pattern(scenario, role).model_copy(update={"role": role, "count": count, "tp": tp})
        for role, count, tp in (
            (Role.PREFILL, shape.prefills, shape.prefill_tp),
            (Role.DECODE, shape.decodes, shape.decode_tp),
            (Role.MIXED, shape.mixed, shape.mixed_tp),
        )
        if count
    ]
    return scenario.model_copy(update={"pools": pools, "name": str(shape)})


def _pattern(scenario: Scenario, role: Role) -> PoolPart:
    return next((pool for pool in scenario.pools if pool.role is role), scenario.pools[0])


def make_plan(
    scenario: Scenario,
    tried: Sequence[Shape],
    *,
    calls: list[Call] | None = None,
    asked: float = 0.9,
    tolerance: float = 0.05,
    margin: float = 0.3,
    on_shape: Callable[[int, int, Shape, Candidate | None], None] | None = None,
) -> Plan:
    """``margin``: shapes that are worse than the best one by more than this share are ruled out.
    ``calls`` instead of the scenario's own. ``on_shape(done, all, shape, found)`` after each.

    Raises ConfigError when none fits, or no target limits how long a request may wait.
    """
    scenario_wait_s(scenario)
    calls = calls if calls is not None else make_calls(scenario)
    candidates: list[Candidate] = []
    ruled_out: dict[str, float] = {}
    skipped: dict[str, str] = {}
    best = 0.0
    for done, shape in enumerate(tried, 1):
        found: Candidate | None = None
        try:
            shaped = with_shape(scenario, shape)
            bar = best * (1 - margin)
            if bar and not _reaches(shaped, calls, bar * shape.num_gpus, asked):
                ruled_out[str(shape)] = bar
            else:
                start = best * shape.num_gpus
                found = evaluate(shaped, shape, calls, asked, tolerance, start)
        except ConfigError as error:
            skipped[str(shape)] = error.message
        if found is not None:
            candidates.append(found)
            best = max(best, found.goodput_per_gpu)
        if on_shape is not None:
            on_shape(done, len(tried), shape, found)
    if not candidates:
        reasons = "; ".join(sorted(set(skipped.values()))) or "there are none"
        raise ConfigError(f"no shape can be simulated: {reasons}", stage="plan")
    candidates.sort(key=lambda item: (-item.goodput_per_gpu, item.shape.num_gpus))
    return Plan(asked, tolerance, tuple(candidates), ruled_out, skipped)


def _reaches(scenario: Scenario, calls: list[Call], rate: float, asked: float) -> bool:
    return run_scenario(scenario, at_rate(calls, rate)).report.total.attainment >= asked


def evaluate(
    scenario: Scenario, shape: Shape, calls: list[Call], asked: float, tolerance: float,
    start: float,
) -> Candidate:  # fmt: skip
    """One shape's worth: the highest rate per GPU. Raises ConfigError when it does not fit."""
    search = search_goodput(scenario, calls=calls, asked=asked, tolerance=tolerance, start=start)
    return Candidate(
        shape=shape,
        rate=search.rate,
        goodput_per_gpu=search.rate / shape.num_gpus,
        attainment=search.best.total.attainment if search.best is not None else 0.0,
        limit=_limit(search.best),
        probes=search.probes,
        is_capped=search.is_capped,
    )


def _limit(report: SimReport | None) -> str:
    """Which target gives way first, and who is busiest."""
    if report is None:
        return "misses its targets at any rate"
    total = report.total
    missed = "TTFT" if total.ttft_attainment <= total.tpot_attainment else "TPOT"
    role, busiest = max(report.roles.items(), key=lambda item: item[1].utilisation)
    return f"{missed} gives way first; {role} instances busy {busiest.utilisation:.0%}"
