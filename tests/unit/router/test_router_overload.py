"""Goodput under overload, in virtual time: what counts is kept, and nothing collapses."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from isthmus.common.errors import SloShedError
from isthmus.common.types import RouteAction, Slo
from tests.support.router_cluster import LATENCY
from tests.support.router_world import World

QUICK = replace(LATENCY, prefill_base=2, prefill_token=0.2, decode_base=5, decode_seq=0.1)
CRITICAL = Slo("critical", ttft_ms=600, tpot_ms=200, quantile=0.9, weight=4.0, is_strict=True)
BULK = Slo("bulk", ttft_ms=1_500, tpot_ms=200, quantile=0.9, weight=1.0, is_strict=True)
CAPACITY_RPS = 4 / 0.122  # prompts of 600 tokens on average; decode instances compute some too
SPAN_MS = 4_000.0


def world_at(load: float, seed: int = 1, **config: object) -> World:
    """``load`` in multiples of what four instances can do; a third of it is critical."""
    world = World(2, 2, latency=QUICK, **config)
    rng, when_ms = random.Random(seed), 0.0
    while when_ms < SPAN_MS:
        when_ms += rng.expovariate(load * CAPACITY_RPS / 1_000)
        slo = CRITICAL if rng.random() < 1 / 3 else BULK
        world.offer(when_ms, rng.randrange(200, 1_000), rng.randrange(4, 12), slo)
    world.start_reports(SPAN_MS + 5_000)
    world.run()
    return world


def check_nothing_is_left(world: World) -> None:
    assert all(job.error is not None or job.ended_ms is not None for job in world.jobs)
    assert world.router.num_held == 0
    assert len(world.router.state.ledger) == 0
    assert len(world.router.feedback) == 0
    world.router.state.ledger.check_integrity()


def test_critical_class_keeps_its_quantile_and_goodput_its_peak_under_overload() -> None:
    peak = world_at(1.0).goodput()
    for load in (2.0, 3.0):
        world = world_at(load)
        check_nothing_is_left(world)
        if load == 2.0:
            assert world.attainment("critical") >= CRITICAL.quantile
        assert world.goodput() >= 0.9 * peak
        assert world.max_depth <= 3  # prompts at an instance: one is computed, one may wait
        shed = [job.error for job in world.jobs if job.error is not None]
        assert shed
        assert all(isinstance(error, SloShedError) for error in shed)


def test_below_capacity_everybody_is_served_in_time() -> None:
    world = world_at(0.5)
    check_nothing_is_left(world)
    assert world.attainment("critical") >= 0.95
    assert world.attainment("bulk") >= 0.95


def test_best_effort_is_late_rather_than_refused_and_never_starved() -> None:
    world = World(1, 1, latency=QUICK, ageing_ms=1_000)
    rng, when_ms = random.Random(2), 0.0
    loose = Slo("loose", ttft_ms=500, weight=0.1)
    while when_ms < 9_000:
        when_ms += rng.expovariate(3 / 122)
        world.offer(when_ms, rng.randrange(200, 1_000), 4, replace(CRITICAL, tpot_ms=None))
    patient = [world.offer(500.0 + 50 * number, 600, 4, loose) for number in range(10)]
    untargeted = [world.offer(500.0 + 50 * number, 600, 4) for number in range(10)]
    world.start_reports(20_000)
    world.run(9_000)
    assert sum(job.first_ms is not None for job in untargeted + patient) >= 3
    world.run()
    check_nothing_is_left(world)
    assert all(job.error is None for job in patient + untargeted)
    actions = Counter(job.decision.action for job in patient if job.decision is not None)
    assert actions[RouteAction.DEGRADE] >= 1


@pytest.mark.parametrize(
    ("late_tokens", "gap_ms", "share"), [(200, 600, 0.8), (1_500, 1_000, 0.06)]
)
def test_few_with_a_target_leave_their_only_worker_to_others_while_it_is_idle(
    late_tokens: int, gap_ms: int, share: float
) -> None:
    """Short prompts at once, long ones when they have aged: those get a tenth of the time."""
    world = World(1, 1, ageing_ms=1_000)
    keen = Slo("keen", ttft_ms=300)
    rng, when_ms = random.Random(4), 0.0
    while when_ms < 60_000:
        when_ms += rng.expovariate(1 / 500)
        world.offer(when_ms, 100, 2, keen)
    late = [world.offer(when_ms, late_tokens, 2) for when_ms in range(100, 60_000, gap_ms)]
    world.start_reports(250_000)
    world.run(62_000)
    assert sum(job.first_ms is not None for job in late) >= share * len(late)
    assert world.attainment("keen") >= 0.8
    world.run()
    check_nothing_is_left(world)


def test_tenants_share_a_queue_by_their_weights() -> None:
    world = World(1, 1, latency=QUICK, tenant_weights={"heavy": 3.0})
    for number in range(80):
        world.offer(float(number), 600, 2, tenant="flood")
    heavy = [world.offer(500.0 + number, 600, 2, tenant="heavy") for number in range(20)]
    light = [world.offer(500.0 + number, 600, 2, tenant="light") for number in range(20)]
    world.start_reports(20_000)
    world.run()
    check_nothing_is_left(world)

    def mean_end(jobs: list) -> float:
        return sum(job.ended_ms for job in jobs) / len(jobs)

    flood = [job for job in world.jobs if job.query.tenant == "flood"]
    assert mean_end(heavy) < mean_end(light) < mean_end(flood)


@pytest.mark.parametrize("seed", [1, 2])
def test_without_targets_it_is_no_worse_than_least_predicted_load(seed: int) -> None:
    means = {}
    for policy in ("goodput", "least_predicted_load"):
        world = World(3, 3, latency=QUICK, policy=policy)
        rng, when_ms = random.Random(seed), 0.0
        while when_ms < 6_000:
            when_ms += rng.expovariate(0.8 * CAPACITY_RPS / 1_000)
            world.offer(when_ms, rng.randrange(50, 1_200), rng.randrange(4, 40))
        world.start_reports(12_000)
        world.run()
        check_nothing_is_left(world)
        ends = [job.ended_ms - job.arrived_ms for job in world.jobs if job.ended_ms is not None]
        means[policy] = sum(ends) / len(ends)
    assert means["goodput"] <= 1.05 * means["least_predicted_load"]


def test_slower_instances_serve_those_who_can_wait() -> None:
    world = World(1, 2, latency=QUICK, exploration=0.0)
    slow = replace(QUICK, prefill_token=0.6)
    world.join("p9", next(iter(world.instances.values())).role, slow)
    tight = Slo("tight", ttft_ms=350, tpot_ms=200, is_strict=True)
    loose = Slo("loose", ttft_ms=5_000, tpot_ms=200, is_strict=True)
    rng, when_ms = random.Random(3), 0.0
    while when_ms < 8_000:
        when_ms += rng.expovariate(0.9 / 90)
        world.offer(when_ms, 600, 4, tight if rng.random() < 0.5 else loose)
    world.start_reports(12_000)
    world.run()
    placed = Counter(
        (job.query.slo.class_name, job.decision.prefill.instance_id)
        for job in world.jobs
        if job.decision is not None and job.decision.prefill is not None
    )
    assert placed["loose", "p9"] > placed["tight", "p9"]
    assert world.attainment("tight") >= 0.85
    assert world.attainment("loose") >= 0.9
