"""Runs scenarios: once, side by side, and at the rate up to which enough requests are good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.common.clock import NS_PER_S
from isthmus.sim.build import make_all_requests, make_calls, make_cluster
from isthmus.sim.records import Record
from isthmus.sim.report import SimReport, make_report
from isthmus.sim.scenario import Scenario
from isthmus.workload import Call, at_rate, mean_rate, repeat
from isthmus.workload.search import Outcome, RateSearch, longest_wait_s, overlapping

EVENTS_BETWEEN = 20_000
OnProgress = Callable[[int, int], None]  # requests that have ended, requests in all


@dataclass(frozen=True, slots=True)
class Run:
    report: SimReport
    records: list[Record]


@dataclass(frozen=True, slots=True)
class Probe:
    rate: float
    attainment: float
    goodput: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class GoodputSearch:
    """``rate``: the highest one found whose attainment reaches ``asked``; 0 when none does.
    ``is_capped``: higher ones may, but were not tried, or not for long enough."""

    asked: float
    rate: float
    is_capped: bool
    probes: tuple[Probe, ...]
    best: SimReport | None  # the run at ``rate``


def run_scenario(
    scenario: Scenario, calls: list[Call] | None = None, on_progress: OnProgress | None = None
) -> Run:
    """``calls`` instead of the scenario's own. Raises ConfigError."""
    requests = make_all_requests(scenario, calls if calls is not None else make_calls(scenario))
    cluster = make_cluster(scenario, requests)
    while not cluster.run(EVENTS_BETWEEN):
        if on_progress is not None:
            on_progress(len(cluster.records) - cluster.num_open, len(requests))
    cluster.close()
    return Run(make_report(scenario.name, cluster, scenario.warm_up), cluster.records)


def with_policy(scenario: Scenario, policy: str) -> Scenario:
    """The same scenario under another of the router's policies."""
    router = scenario.router.model_copy(update={"policy": policy})
    return scenario.model_copy(update={"router": router})


def search_goodput(
    scenario: Scenario,
    *,
    calls: list[Call] | None = None,
    asked: float = 0.9,
    tolerance: float = 0.05,
    start: float = 0.0,
    highest: float = 1e5,
    on_probe: Callable[[Probe], None] | None = None,
) -> GoodputSearch:
    """DistServe's measure (OSDI 2024, §4) by ``workload.search``, over whole runs with the same
    calls (``calls`` instead of the scenario's own), stretched to the rate and repeated where they
    are over too soon. ``start`` 0 = the calls' own rate. Attainment is joint: a request must meet
    all of its targets.

    Raises ConfigError, also when no target limits how long a request may wait.
    """
    wait_s = scenario_wait_s(scenario)
    calls = calls if calls is not None else make_calls(scenario)
    probes: list[Probe] = []
    reports: dict[float, SimReport] = {}  # of rates that attain enough
    start = start or mean_rate(calls)
    rates = RateSearch(start, asked, tolerance, 0.0, highest, len(calls), wait_s)
    while not rates.is_over:
        rate = rates.rate
        run = run_scenario(scenario, at_rate(repeat(calls, rates.copies), rate))
        report = run.report
        total = report.total
        probes.append(Probe(rate, total.attainment, total.goodput, len(run.records)))
        if on_probe is not None:
            on_probe(probes[-1])
        if total.attainment >= asked:
            reports[rate] = report
        rates.tell(_outcome(run))
    found = rates.passing
    return GoodputSearch(asked, found, rates.is_capped, tuple(probes), reports.get(found))


def scenario_wait_s(scenario: Scenario) -> float:
    """How long a good request may wait. Raises ConfigError when no target limits it."""
    return longest_wait_s(part.slo(name) for name, part in scenario.classes.items())


def _outcome(run: Run) -> Outcome:
    spans = [
        (record.request.arrival_ns / NS_PER_S, (record.end_ns or 0) / NS_PER_S)
        for record in run.records
    ]
    total = run.report.total
    return Outcome(total.attainment, (total.e2e.p50 or 0.0) / 1e3, overlapping(spans))
