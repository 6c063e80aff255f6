"""Whom to leave out when not everybody can be in time.

Moore and Hodgson's rule (J. M. Moore, Management Science 15(1), 1968) leaves out as few jobs as
possible on one machine: go through the jobs by due time, and whenever one would end late, leave out
the longest so far. With weights the problem is NP-hard; leaving out the job with most work for its
weight is exact for equal weights and for jobs of equal length, and a good heuristic in between.

A pool is taken for one machine that does a unit of work in a unit of time: a job must *start* by
its latest start, when what is before it is done; with ``due`` = what the pool can have done by the
latest start (``capacity``) + its own work, that is the rule for one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

NEVER_LATE = float("inf")


@dataclass(frozen=True, slots=True)
class Job:
    due_ms: float  # from now, in work; by when it must have ended
    work_ms: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``left_out``: places of jobs. ``slack_ms``: by how much all the others could be put off."""

    left_out: tuple[int, ...]
    slack_ms: float


def leave_out(jobs: Sequence[Job]) -> Plan:
    """O(n log n)."""
    order = sorted(range(len(jobs)), key=lambda place: (jobs[place].due_ms, place))
    kept: list[tuple[float, int]] = []  # worst (most work for its weight) first
    left_out: set[int] = set()
    busy_ms = 0.0
    for place in order:
        job = jobs[place]
        heappush(kept, (-job.work_ms / job.weight, place))
        busy_ms += job.work_ms
        while busy_ms > job.due_ms and kept:
            _, worst = heappop(kept)
            left_out.add(worst)
            busy_ms -= jobs[worst].work_ms
    return Plan(tuple(sorted(left_out)), _slack_ms(jobs, order, left_out))


def _slack_ms(jobs: Sequence[Job], order: Sequence[int], left_out: set[int]) -> float:
    slack_ms, ends_ms = NEVER_LATE, 0.0
    for place in order:
        if place not in left_out:
            ends_ms += jobs[place].work_ms
            slack_ms = min(slack_ms, jobs[place].due_ms - ends_ms)
    return slack_ms
