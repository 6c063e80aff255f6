"""Whom to leave out when not everybody can be in time.

Moore and Hodgson's rule (J. M. Moore, Management Science 15(1), 1968) leaves out as few jobs as
possible on one machine: go through the jobs by due time, and whenever one would end late, leave out
the longest so far. With weights the problem is NP-hard; leaving out the job with most work for its
weight is exact for equal weights and for jobs of equal length, and a good heuristic in between.

A pool of m alike machines is taken for one that is m times as fast: a job must *start* by its
latest start, when what is before it has been shared out; with ``due = latest start + work / m``
that is the rule for one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

NEVER_LATE = float("inf")


@dataclass(frozen=True, slots=True)
class Job:
    due_ms: float  # from now; by when it must have ended
    work_ms: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``left_out``: places of jobs. ``slack_ms``: by how much all the others could be put off."""

    left_out: tuple[int, ...]
    slack_ms: float


def leave_out(jobs: Sequence[Job], ready_ms: float = 0.0) -> Plan:
    """``ready_ms``: when the machine is free for the first of them. O(n log n)."""
    order = sorted(range(len(jobs)), key=lambda place: (jobs[place].due_ms, place))
    kept: list[tuple[float, int]] = []  # worst (most work for its weight) first
    left_out: set[int] = set()
    busy_ms = ready_ms
    for place in order:
        job = jobs[place]
        heappush(kept, (-job.work_ms / job.weight, place))
        busy_ms += job.work_ms
        while busy_ms > job.due_ms and kept:
            _, worst = heappop(kept)
            left_out.add(worst)
            busy_ms -= jobs[worst].work_ms
    return Plan(tuple(sorted(left_out)), _slack_ms(jobs, order, left_out, ready_ms))


def _slack_ms(
    jobs: Sequence[Job], order: Sequence[int], left_out: set[int], ready_ms: float
) -> float:
    slack_ms, ends_ms = NEVER_LATE, ready_ms
    for place in order:
        if place not in left_out:
            ends_ms += jobs[place].work_ms
            slack_ms = min(slack_ms, jobs[place].due_ms - ends_ms)
    return slack_ms
