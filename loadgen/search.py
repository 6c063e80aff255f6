"""The highest rate at which enough calls are good, over whole runs (``workload.search``).

Every rate is tried with the same sequence of gaps and lengths, stretched to the rate, so that two
rates differ by the rate and not by their luck. A call must meet both of its targets at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from isthmus.workload.search import RateSearch

Attained = Callable[[float], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Probe:
    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Search:
    """``rate`` is 0 when not even the lowest rate that was tried attains enough; ``is_capped`` when
    the highest allowed one still does."""

    asked: float
    rate: float
    is_capped: bool
    probes: list[Probe] = field(default_factory=list)


async def search_goodput(
    attained: Attained,
    *,
    start: float,
    asked: float = 0.9,
    tolerance: float = 0.1,
    lowest: float = 1e-3,
    highest: float = 1e6,
) -> Search:
    """``attained(rate)`` runs one probe. The rate found is within ``tolerance`` (a share of it) of
    one that fails.

    Raises ValueError when ``start`` is not between ``lowest`` and ``highest``."""
    if not 0 < lowest <= start <= highest:
        raise ValueError(f"the search must start between {lowest:g} and {highest:g}, not {start:g}")
    probes: list[Probe] = []
    search = RateSearch(start, tolerance, lowest, highest)
    while not search.is_over:
        probes.append(Probe(search.rate, await attained(search.rate)))
        search.tell(is_enough=probes[-1].attainment >= asked)
    return Search(asked, search.passing, is_capped=search.is_capped, probes=probes)
