"""The highest rate at which enough calls are good: doubling, then bisection over whole runs.

Every rate is tried with the same sequence of gaps and lengths, stretched to the rate, so that two
rates differ by the rate and not by their luck. As in DistServe (OSDI '24, section 4) the
answer is the largest rate whose attainment reaches the asked one; here a call must meet both of its
targets at once. Attainment falls with the rate but for noise: a probe that fails is believed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

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

    async def passes(rate: float) -> bool:
        probes.append(Probe(rate, await attained(rate)))
        return probes[-1].attainment >= asked

    passing, failing = 0.0, 0.0
    rate = start
    while not (passing and failing):
        if await passes(rate):
            passing = rate
            if rate >= highest:
                return Search(asked, rate, is_capped=True, probes=probes)
            rate = min(2 * rate, highest)
        else:
            failing = rate
            if rate <= lowest:
                return Search(asked, 0.0, is_capped=False, probes=probes)
            rate = max(rate / 2, lowest)
    while failing > passing * (1 + tolerance):
        rate = (passing * failing) ** 0.5  # the middle by ratio, as the tolerance is one
        if await passes(rate):
            passing = rate
        else:
            failing = rate
    return Search(asked, passing, is_capped=False, probes=probes)
