"""Whom to leave out: Moore and Hodgson's rule against every possible choice."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.router.shedding import NEVER_LATE, Job, leave_out

JOBS = st.lists(
    st.builds(Job, due_ms=st.integers(0, 40).map(float), work_ms=st.integers(1, 15).map(float)),
    max_size=8,
)


def in_time(jobs: list[Job], ready_ms: float = 0.0) -> bool:
    ends_ms = ready_ms
    for job in sorted(jobs, key=lambda job: job.due_ms):
        ends_ms += job.work_ms
        if ends_ms > job.due_ms:
            return False
    return True


def fewest_left_out(jobs: list[Job]) -> int:
    for count in range(len(jobs) + 1):
        for out in combinations(range(len(jobs)), count):
            if in_time([job for place, job in enumerate(jobs) if place not in out]):
                return count
    raise AssertionError("nobody at all is always in time")


@given(JOBS)
def test_leaves_out_as_few_as_any_choice(jobs: list[Job]) -> None:
    plan = leave_out(jobs)
    kept = [job for place, job in enumerate(jobs) if place not in plan.left_out]
    assert in_time(kept)
    assert len(plan.left_out) == fewest_left_out(jobs)


@given(JOBS)
def test_slack_is_how_long_the_rest_can_be_put_off(jobs: list[Job]) -> None:
    plan = leave_out(jobs)
    kept = [job for place, job in enumerate(jobs) if place not in plan.left_out]
    if not kept:
        assert plan.slack_ms == NEVER_LATE
        return
    assert in_time(kept, plan.slack_ms)
    assert not in_time(kept, plan.slack_ms + 1)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=8))
def test_of_jobs_of_one_length_the_lightest_are_left_out(pairs: list[tuple[int, int]]) -> None:
    jobs = [Job(float(due), 5.0, float(weight)) for due, weight in pairs]
    plan = leave_out(jobs)
    lost = sum(jobs[place].weight for place in plan.left_out)
    best = min(
        sum(jobs[place].weight for place in out)
        for count in range(len(jobs) + 1)
        for out in combinations(range(len(jobs)), count)
        if in_time([job for place, job in enumerate(jobs) if place not in out])
    )
    assert lost == best
