"""Whatever arrives and however scarce blocks are: budgets hold, decodes advance, all finish."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.clock import VirtualClock
from isthmus.engine.block_table import TableState
from isthmus.engine.kv_manager import KvCacheManager
from isthmus.engine.pacer import Pacer
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.engine.sequence import SeqStatus, Sequence
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import make_prompt, make_request

BLOCK_SIZE = 4
NUM_BLOCKS = 13  # 48 tokens
MAX_STEPS = 3000


@dataclass(frozen=True)
class Arrival:
    at_step: int
    num_prompt_tokens: int
    num_output_tokens: int
    mode: SequenceMode
    has_kv: bool


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 30),
        num_prompt_tokens=st.integers(1, 30),
        num_output_tokens=st.integers(1, 18),
        mode=st.sampled_from(SequenceMode),
        has_kv=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


class SchedulerModel:
    """Plays the engine: enters each plan's results, frees what is finished.

    ``depth`` steps may be in flight; a sequence ends earlier than its request makes sure, as with a
    stop token, so that the step behind its last one is void for it."""

    def __init__(self, budget: int, max_num_seqs: int, watermark: float, depth: int = 1) -> None:
        self.kv = KvCacheManager(NUM_BLOCKS, BLOCK_SIZE, watermark, enable_prefix_cache=True)
        self.scheduler = Scheduler(self.kv, Pacer(VirtualClock()), budget, max_num_seqs)
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.depth = depth
        self.flights: deque[StepPlan] = deque()
        self.left: dict[Sequence, int] = {}  # output tokens to go
        self.over: list[Sequence] = []  # whose blocks a step in flight may still write

    def arrive(self, name: str, arrival: Arrival, now: int) -> bool:
        """False when blocks for a transferred prompt are not to be had now."""
        prompt = make_prompt(arrival.num_prompt_tokens, salt=len(self.left))
        request = make_request(name, prompt, max_tokens=arrival.num_output_tokens + 1)
        sequence = Sequence(request, arrival.mode, [], added_ns=now)
        if not arrival.has_kv or arrival.mode is SequenceMode.PREFILL_ONLY:
            self.scheduler.add(sequence)
        else:
            wanted = self.scheduler.num_wanted_blocks()
            table = self.kv.try_allocate(
                len(prompt), [], state=TableState.RESERVED, keep_free=wanted
            )
            if table is None:
                return False
            self.kv.move(table, TableState.USED)
            sequence.table = table
            sequence.num_computed_tokens = len(prompt)
            sequence.append_token(1)
            self.scheduler.add_with_kv(sequence)
        self.left[sequence] = arrival.num_output_tokens
        return True

    def check(self, plan: StepPlan, decoding_before: list[Sequence]) -> None:
        counts = plan.counts
        assert min(counts) >= 1
        assert sum(counts) == plan.num_prefill_tokens + plan.num_decode_tokens <= self.budget
        assert len(set(plan.scheduled)) == len(plan.scheduled) <= self.max_num_seqs
        for sequence, start, count in zip(plan.scheduled, plan.starts, plan.counts, strict=True):
            assert sequence.status is SeqStatus.RUNNING
            assert sequence.table is not None
            last = start + count
            assert last <= min(len(sequence.table) * BLOCK_SIZE, sequence.num_expected_tokens)
        for sequence in decoding_before:  # the decode share: in the plan, unless preempted
            assert sequence in plan.scheduled or sequence.status is SeqStatus.PREEMPTED

    def step(self) -> bool:
        while len(self.flights) < self.depth:
            decoding = [
                s
                for s in self.scheduler.running
                if s.status is SeqStatus.RUNNING and s.num_schedulable_tokens == 1
            ]
            plan = self.scheduler.schedule(can_preempt=not self.flights)
            if plan is None:
                break
            self.check(plan, decoding)
            self.flights.append(plan)
        if not self.flights:
            return False
        self.land(self.flights.popleft())
        self.kv.check_integrity()
        return True

    def land(self, plan: StepPlan) -> None:
        for sequence, count, samples in zip(plan.scheduled, plan.counts, plan.samples, strict=True):
            if sequence.status is not SeqStatus.RUNNING:
                continue
            sequence.land(count)
            if samples:
                sequence.land_token(1)
                self.left[sequence] -= 1
                if not self.left[sequence] or sequence.mode is SequenceMode.PREFILL_ONLY:
                    self.finish(sequence)
        in_flight = {sequence for plan in self.flights for sequence in plan.scheduled}
        for sequence in [s for s in self.over if s not in in_flight]:
            self.over.remove(sequence)
            assert sequence.table is not None
            self.kv.free(sequence.table)

    def finish(self, sequence: Sequence) -> None:
        del self.left[sequence]
        self.scheduler.remove(sequence)
        sequence.move_to(SeqStatus.FINISHED)
        self.over.append(sequence)


@settings(max_examples=120, deadline=None)
@given(
    arrivals=ARRIVALS,
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    watermark=st.sampled_from([0.0, 0.1, 0.4]),
    depth=st.sampled_from([1, 2]),
)
def test_budget_holds_decodes_advance_and_nobody_starves(
    arrivals: list[Arrival], budget: int, max_num_seqs: int, watermark: float, depth: int
) -> None:
    model = SchedulerModel(budget, max_num_seqs, watermark, depth)
    pending = {f"s{i}": arrival for i, arrival in enumerate(arrivals)}
    for now in range(MAX_STEPS):
        for name, arrival in list(pending.items()):
            if arrival.at_step <= now and model.arrive(name, arrival, now):
                del pending[name]
        ran = model.step()
        if not pending and not model.left:
            break
        assert ran or any(arrival.at_step > now for arrival in pending.values())
    assert not model.left
    assert not pending
    while model.step():  # what is in flight is void
        pass
    assert model.kv.num_free_blocks == NUM_BLOCKS - 1


@settings(max_examples=30, deadline=None)
@given(newcomers=st.integers(1, 40), budget=st.integers(8, 24))
def test_waiting_sequence_is_not_overtaken_for_ever(newcomers: int, budget: int) -> None:
    """A prompt that needs nearly all blocks waits while small ones keep coming behind it."""
    model = SchedulerModel(budget, 4, 0.0)
    small = Arrival(0, 8, 4, SequenceMode.FULL, has_kv=False)
    transferred = Arrival(0, 8, 4, SequenceMode.FULL, has_kv=True)
    for index in range(3):
        model.arrive(f"early{index}", small, now=0)
    model.step()
    model.arrive("big", Arrival(0, 30, 1, SequenceMode.FULL, has_kv=False), now=1)
    big = next(s for s in model.left if s.request_id == "big")
    for index in range(newcomers):
        model.arrive(f"late{index}", (small, transferred)[index % 2], now=2 + index)
        model.step()
    steps = 0
    while big in model.left:
        assert model.step()
        steps += 1
    assert steps <= 60  # however many came behind it


def test_preempted_sequences_return_in_their_order_before_newcomers() -> None:
    model = SchedulerModel(40, 3, 0.0)
    for index in range(4):
        model.arrive(f"s{index}", Arrival(0, 11, 18, SequenceMode.FULL, False), now=index)
    while sum(s.status is SeqStatus.PREEMPTED for s in model.left) < 2:
        assert model.step()
    assert [s.request_id for s in model.scheduler.running] == ["s0"]
    assert [s.request_id for s in model.scheduler.waiting] == ["s1", "s2", "s3"]
