"""The highest rate at which enough calls are good: doubling, then bisection by ratio.

As in DistServe (OSDI '24, section 4) the answer is the largest rate whose attainment reaches the
asked one. Attainment falls with the rate but for noise: a probe that fails is believed.

One that passes is believed only when it offered its load for long enough. A backlog that grows
shows once it is as long as a call may wait, and a batch is full after as long as a call takes:
in less time than that every rate is good. So a probe's calls come for ``LASTING`` times the longest
wait that a target allows and the median call; where the workload is too short for that at a rate,
it is repeated, up to ``MOST_CALLS`` calls. Rates that would need more are not answers.

What such a run cannot tell is a backlog that reaches the longest wait only as the run ends: at an
attainment a, a rate that is found may be 1 / (a · ``LASTING``) above what can be kept up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from isthmus.common.errors import ConfigError
from isthmus.common.types import Slo

LASTING = 5.0
MOST_CALLS = 10_000
WHY_CAPPED = (
    f"higher rates were not tried, or not for long enough: a run has {MOST_CALLS:,} calls at most "
    "(or as many as were asked for), and they must come for "
    f"{LASTING:g} times as long as a good call may wait, and as it takes"
)


def longest_wait_s(slos: Iterable[Slo]) -> float:
    """How long a good call may wait, at most. Raises ConfigError when no target says so: any rate
    would be good enough, as those who wait for ever are never late."""
    limits = [slo.ttft_ms if slo.ttft_ms is not None else slo.e2e_ms for slo in slos]
    known = [limit for limit in limits if limit is not None]
    if not known:
        message = "a search needs a TTFT target: without one any rate is good enough"
        raise ConfigError(message, stage="search")
    return max(known) / 1e3


def overlapping(spans: Iterable[tuple[float, float]]) -> float:
    """The share of calls, from begin to end each, during which another one was open."""
    ordered = sorted(spans)
    are_alone = [True] * len(ordered)
    latest = 0  # of those so far, the one that ends last
    for place in range(1, len(ordered)):
        if ordered[place][0] < ordered[latest][1]:
            are_alone[place] = are_alone[latest] = False
        if ordered[place][1] > ordered[latest][1]:
            latest = place
    return are_alone.count(False) / max(1, len(ordered))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one probe. ``call_s``: how long its median call took."""

    attainment: float
    call_s: float
    overlapping: float


@dataclass(slots=True)
class RateSearch:
    """``rate`` and ``copies`` (of the workload's ``num_calls`` calls) are what to try next, until
    ``is_over``; then ``passing`` is the answer, within ``tolerance`` (a share of it) of one that
    does not count. It is 0 when no rate passes: not even ``lowest``, or one at which too few calls
    shared the server for a lower rate to change enough. ``is_capped``: higher rates may pass, but
    were not tried, or not for long enough."""

    rate: float
    asked: float
    tolerance: float
    lowest: float
    highest: float
    num_calls: int
    wait_s: float
    copies: int = field(init=False)
    passing: float = field(default=0.0, init=False)
    failing: float = field(default=0.0, init=False)
    is_capped: bool = field(default=False, init=False)
    is_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        longest = self._most_copies * self.num_calls / (LASTING * self.wait_s)
        self.highest = min(self.highest, longest)
        self.lowest = min(self.lowest, self.highest)
        self._turn_to(min(max(self.rate, self.lowest), self.highest))

    @property
    def _most_copies(self) -> int:
        return max(1, MOST_CALLS // self.num_calls)

    def _copies_for(self, seconds: float) -> int:
        # A rate that was made of a number of copies needs no more of them for its last digit.
        needed = LASTING * seconds * self.rate / self.num_calls
        return max(1, math.ceil(needed * (1 - 1e-9)))

    def _turn_to(self, rate: float) -> None:
        self.rate = rate
        self.copies = min(self._copies_for(self.wait_s), self._most_copies)

    def tell(self, outcome: Outcome) -> None:
        """What the run of ``copies`` at ``rate`` came to."""
        is_enough = outcome.attainment >= self.asked
        needed = self._copies_for(outcome.call_s)
        is_short = is_enough and needed > self.copies
        if is_short and self.copies < self._most_copies:
            self.copies = min(max(needed, 2 * self.copies), self._most_copies)
            return
        if is_enough and not is_short:
            self.passing = self.rate
        else:
            self.failing, self.is_capped = self.rate, is_short
        self._choose(can_be_better=outcome.attainment + outcome.overlapping >= self.asked)

    def _choose(self, *, can_be_better: bool) -> None:
        if self.passing and self.failing:
            self.is_over = self.failing <= self.passing * (1 + self.tolerance)
            # The middle by ratio, as the tolerance is one.
            self._turn_to((self.passing * self.failing) ** 0.5)
        elif self.passing:
            self.is_over = self.is_capped = self.rate >= self.highest
            self._turn_to(min(2 * self.rate, self.highest))
        else:
            self.is_over = self.rate <= self.lowest or not can_be_better
            self._turn_to(max(self.rate / 2, self.lowest))
