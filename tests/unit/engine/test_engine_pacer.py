"""Chunks of prompts leave decodes the time that their TPOT targets ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from isthmus.common.answer_lengths import ENOUGH
from isthmus.common.clock import VirtualClock
from isthmus.common.cluster import LatencyModel, StepTotals
from isthmus.common.pacing import LONGEST_GAP, PACE
from isthmus.common.types import Slo
from isthmus.engine.block_table import TableState
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.pacer import Pacer
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.engine.sequence import Sequence
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import make_prompt, make_request
from tests.support.tiny_model import make_tiny_core

SPEED = LatencyModel(
    prefill_base=10.0,
    prefill_token=1.0,
    prefill_pair=0.0,
    decode_base=18.0,
    decode_seq=2.0,
    decode_context=0.0,
)
TARGET = 100.0
BUDGET = 512


class Bench:
    """A scheduler that runs on a clock which steps move on by what the model says."""

    def __init__(self, speed: LatencyModel | None = SPEED) -> None:
        self.clock = VirtualClock()
        self.kv = KvCacheManager(257, 16, 0.0, enable_prefix_cache=False)
        pacer = Pacer(self.clock)
        if speed is not None:
            pacer.expect(speed)
        self.scheduler = Scheduler(self.kv, pacer, BUDGET, 16)
        self.clock.advance_ms(1_000.0)

    def wait(self, name: str, num_tokens: int) -> None:
        self.scheduler.add(self._sequence(name, num_tokens, None))

    def arrive(self, name: str, target_ms: float | None = TARGET) -> Sequence:
        sequence = self._sequence(name, 8, target_ms)
        table = self.kv.try_allocate(8, [], state=TableState.RESERVED)
        assert table is not None
        self.kv.move(table, TableState.USED)
        sequence.table = table
        sequence.num_computed_tokens = 8
        sequence.append_token(1)
        sequence.pace_from(self.clock.monotonic_ns(), sequence.num_tokens)
        self.scheduler.add_with_kv(sequence)
        return sequence

    def step(self, coming_ms: Iterable[float] = ()) -> StepPlan:
        plan = self.scheduler.schedule(coming_ms)
        assert plan is not None
        self.clock.advance_ms(self.length_ms(plan))
        for sequence, count, samples in zip(plan.scheduled, plan.counts, plan.samples, strict=True):
            sequence.land(count)
            if samples:
                sequence.land_token(1)
        return plan

    @staticmethod
    def length_ms(plan: StepPlan) -> float:
        decodes = plan.num_decode_tokens
        base = max(SPEED.decode_base, SPEED.prefill_base) if decodes else SPEED.prefill_base
        return base + decodes * SPEED.decode_seq + plan.num_prefill_tokens * SPEED.prefill_token

    def _sequence(self, name: str, num_tokens: int, target_ms: float | None) -> Sequence:
        request = make_request(name, make_prompt(num_tokens), max_tokens=200)
        request = replace(request, slo=Slo(tpot_ms=target_ms))
        return Sequence(request, SequenceMode.FULL, [], self.clock.monotonic_ns())


def test_a_prompt_beside_a_decode_keeps_to_its_pace() -> None:
    bench = Bench()
    resident = bench.arrive("resident")
    began_ns = bench.clock.monotonic_ns()
    bench.wait("prompt", 600)
    sizes = []
    while sum(sizes) < 600:
        plan = bench.step()
        sizes.append(plan.num_prefill_tokens)
        assert plan.is_paced == (sum(sizes) < 600)
    elapsed_ms = (bench.clock.monotonic_ns() - began_ns) / 1e6
    per_token = elapsed_ms / (resident.num_tokens - resident.paced_from_tokens)
    assert per_token <= PACE * TARGET + 1.0
    # And no shorter than it must be: what the decode leaves of its pace is used.
    assert sum(sizes) / len(sizes) >= (PACE * TARGET - 20.0) * 0.9


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    bench = Bench()
    bench.wait("prompt", 600)
    plan = bench.step()
    assert plan.num_prefill_tokens == BUDGET
    assert not plan.is_paced


@pytest.mark.parametrize("target_ms", [None, TARGET])
def test_without_a_target_or_a_speed_only_tokens_limit_a_step(target_ms: float | None) -> None:
    bench = Bench(SPEED if target_ms is None else None)
    bench.arrive("resident", target_ms)
    bench.wait("prompt", 600)
    assert bench.step().num_prefill_tokens == BUDGET - 1


def test_a_resident_that_is_ahead_lets_a_longer_chunk_pass() -> None:
    bench = Bench()
    bench.arrive("resident")
    for _ in range(3):  # 20 ms instead of 90
        bench.step()
    bench.wait("prompt", 600)
    assert bench.step().num_prefill_tokens == pytest.approx(4 * 90 - 3 * 20 - 20, abs=2)


def test_a_short_prompt_is_computed_at_once_where_answers_can_make_up_for_it() -> None:
    bench = Bench()
    for _ in range(ENOUGH):
        ended = bench.arrive("ended")
        for _ in range(12):
            bench.step()
        bench.scheduler.answered(ended)
        bench.scheduler.remove(ended)
    bench.arrive("resident")
    bench.wait("prompt", 120)
    assert bench.step().num_prefill_tokens == 120


def test_what_ran_to_measure_the_speed_of_steps_is_no_answer() -> None:
    bench = Bench()
    pacer = Pacer(bench.clock)
    for _ in range(ENOUGH):
        pacer.answered(1)
    pacer.expect(SPEED)
    for _ in range(ENOUGH):
        pacer.answered(12)
    resident = bench.arrive("resident")
    budget = pacer.budget(BUDGET, [resident], float("inf"), is_idle=True)
    assert budget.take(120, 0) == 120


@pytest.mark.parametrize(("mode", "least"), [(SequenceMode.FULL, 13), (SequenceMode.PRIVATE, 0)])
@pytest.mark.parametrize("is_aborted", [True, False])
def test_an_answer_counts_whoever_ends_it_and_a_canary_does_not(
    mode: SequenceMode, least: int, is_aborted: bool
) -> None:
    core = make_tiny_core()
    for number in range(ENOUGH):
        name = f"answer{number}"
        request = make_request(
            name, make_prompt(20, number), 12, max_tokens=40 if is_aborted else 13
        )
        core.add(request, mode)
        core.step()
        assert core.abort(request.request_id) is is_aborted
    assert core._pacer._answers.least == least


def test_who_is_on_its_way_does_not_find_a_long_step_begun() -> None:
    bench = Bench()
    bench.wait("prompt", 1_200)
    assert (
        bench.step(coming_ms=[TARGET]).num_prefill_tokens
        == LONGEST_GAP * TARGET - SPEED.prefill_base
    )
    assert bench.step().num_prefill_tokens == BUDGET


@pytest.mark.parametrize("reverse", [False, True])
def test_the_nearest_deadline_of_many_counts_in_whatever_order_they_are(reverse: bool) -> None:
    bench = Bench(replace(SPEED, decode_seq=0.0))
    ahead = {"relaxed": 400.0, "urgent": 60.0, "free": None, "usual": TARGET}
    names = sorted(ahead, reverse=reverse)
    for name in names:
        bench.arrive(name, ahead[name])
    bench.wait("prompt", 600)
    assert bench.step().num_prefill_tokens == pytest.approx(PACE * 60.0 - 18.0, abs=1)


@pytest.mark.parametrize("is_coming", [True, False])
def test_who_waits_for_kv_no_more_limits_no_step(is_coming: bool) -> None:
    core = make_tiny_core(num_blocks=129, max_num_batched_tokens=256)
    core.expect(SPEED)
    coming = replace(make_request("coming", make_prompt(8)), slo=Slo(tpot_ms=TARGET / 2))
    reservation = core.reserve(coming)
    if not is_coming:
        core.cancel_reservation(reservation, quarantine=False)
    core.add(make_request("prompt", make_prompt(200)))
    step = core.step()
    assert step is not None
    within_gap = LONGEST_GAP * TARGET / 2 - SPEED.prefill_base
    assert step.num_prefill_tokens == (within_gap if is_coming else 200)


def test_a_target_that_no_step_can_keep_starves_no_prompt() -> None:
    bench = Bench()
    bench.arrive("hopeless", target_ms=10.0)
    for _ in range(30):  # 20 ms each
        bench.step()
    bench.wait("prompt", 600)
    for _ in range(200):
        if not bench.step().num_prefill_tokens:
            break
    assert not bench.scheduler.waiting
    assert all(s.num_uncomputed_tokens <= 1 for s in bench.scheduler.running)


def test_a_step_behind_one_in_flight_is_due_when_that_has_ended() -> None:
    bench = Bench()
    resident = bench.arrive("resident")
    bench.wait("prompt", 600)
    first = bench.scheduler.schedule()
    assert first is not None
    assert first.num_prefill_tokens == pytest.approx(70, abs=1)
    # The first is expected to end in time for one token; the next may take as long again.
    second = bench.scheduler.schedule(can_preempt=False)
    assert second is not None
    assert resident in second.scheduled
    assert second.num_prefill_tokens == pytest.approx(70, abs=2)


def test_a_stream_that_goes_on_here_is_due_from_its_first_token_elsewhere() -> None:
    bench = Bench()
    late = bench.arrive("late")
    late.pace_from(bench.clock.monotonic_ns() - 500_000_000, late.num_tokens)
    bench.wait("prompt", 600)
    # Half a second behind: it takes back half of what it could.
    assert bench.step().num_prefill_tokens == pytest.approx((PACE * TARGET - 20) / 2, abs=1)


@pytest.mark.parametrize("has_kv", [True, False])
def test_a_resumed_stream_owes_the_tokens_that_were_due_while_its_instance_was_lost(
    has_kv: bool,
) -> None:
    clock = VirtualClock(start_ns=10**18)
    core = make_tiny_core(clock=clock)
    core.expect(replace(SPEED, prefill_token=20.0))
    request = replace(
        make_request("resumed", make_prompt(8), num_resumed_tokens=3, max_tokens=40),
        slo=Slo(tpot_ms=TARGET),
        first_token_ns=clock.now_ns() - 1_000_000_000,  # nine more tokens were due
    )
    if has_kv:
        core.admit_with_kv(core.reserve(request), request, first_token=1)
    else:
        core.add(request)
        core.step()
    core.add(make_request("prompt", make_prompt(20)))
    # It takes back half of what it could: 35 ms, and a token of the prompt costs 20.
    chunk = core.step()
    assert chunk is not None
    assert chunk.num_decode_tokens == 1
    assert chunk.num_prefill_tokens == 1
    assert chunk.is_paced


def test_steps_slower_than_expected_get_smaller_chunks() -> None:
    bench = Bench(replace(SPEED, prefill_token=0.25))
    pacer = Pacer(bench.clock)
    pacer.expect(replace(SPEED, prefill_token=0.25))
    resident = bench.arrive("resident")
    bench.step()
    fresh = pacer.budget(BUDGET, [resident], float("inf"), is_idle=True)
    before = fresh.take(BUDGET, 0)
    totals = bench_totals()
    for done in totals:
        pacer.observe(done)
    after = pacer.budget(BUDGET, [resident], float("inf"), is_idle=True).take(BUDGET, 0)
    assert after < before / 2


def bench_totals() -> list[StepTotals]:
    """Fifty prefill steps of 100 tokens, at a millisecond a token."""
    return [
        StepTotals(
            prefill_steps=n, prefill_tokens=100 * n, prefill_pairs=5_000.0 * n, prefill_ms=110.0 * n
        )
        for n in range(50)
    ]
