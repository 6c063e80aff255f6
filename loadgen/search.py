"""The highest rate at which enough calls are good, over whole runs (``workload.search``).

Every rate is tried with the same sequence of gaps and lengths, stretched to the rate and repeated
where it is over too soon, so that two rates differ by the rate and not by their luck. A call must
meet both of its targets at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from isthmus.loadgen.summary import Summary
from isthmus.loadgen.types import Record
from isthmus.workload.search import Outcome, RateSearch, overlapping

Try = Callable[[float, int], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Probe:
    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Search:
    """``rate`` is 0 when not even the lowest rate that was tried attains enough; ``is_capped`` when
    higher ones may, but were not tried, or not for long enough."""

    asked: float
    rate: float
    is_capped: bool
    probes: list[Probe] = field(default_factory=list)


async def search_goodput(
    run: Try,
    *,
    start: float,
    num_calls: int,
    wait_s: float,
    asked: float = 0.9,
    tolerance: float = 0.1,
    lowest: float = 1e-3,
    highest: float = 1e6,
) -> Search:
    """``run(rate, copies)`` runs one probe, of so many copies of the workload's ``num_calls``.
    ``wait_s``: how long a good call may wait. The rate found is within ``tolerance`` (a share of
    it) of one that fails."""
    probes: list[Probe] = []
    search = RateSearch(start, asked, tolerance, lowest, highest, num_calls, wait_s)
    while not search.is_over:
        outcome = await run(search.rate, search.copies)
        probes.append(Probe(search.rate, outcome.attainment))
        search.tell(outcome)
    return Search(asked, search.passing, is_capped=search.is_capped, probes=probes)


def outcome_of(records: Sequence[Record], summary: Summary) -> Outcome:
    spans = [(record.sent_s, record.ended_s) for record in records]
    return Outcome(summary.attainment, (summary.e2e.p50 or 0.0) / 1e3, overlapping(spans))
