"""Whatever arrives and however scarce blocks are: budgets hold, decodes advance, all finish."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.engine.block_table import TableState
from isthmus.engine.kv_manager import KvCacheManager
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
    """Plays the engine: enters each plan's results, frees what is finished."""

    def __init__(self, budget: int, max_num_seqs: int, watermark: float) -> None:
        self.kv = KvCacheManager(NUM_BLOCKS, BLOCK_SIZE, watermark, enable_prefix_cache=True)
        self.scheduler = Scheduler(self.kv, budget, max_num_seqs)
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.left: dict[Sequence, int] = {}  # output tokens to go

    def arrive(self, name: str, arrival: Arrival, now: int) -> bool:
        """False when blocks for a transferred prompt are not to be had now."""
        prompt = make_prompt(arrival.num_prompt_tokens, salt=len(self.left))
        sequence = Sequence(make_request(name, prompt), arrival.mode, [], added_ns=now)
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
        counts = [s.num_scheduled_tokens for s in plan.scheduled]
        assert min(counts) >= 1
        assert sum(counts) == plan.num_prefill_tokens + plan.num_decode_tokens <= self.budget
        assert len(set(plan.scheduled)) == len(plan.scheduled) <= self.max_num_seqs
        for sequence in plan.scheduled:
            assert sequence.status is SeqStatus.RUNNING
            assert sequence.table is not None
            last = sequence.num_computed_tokens + sequence.num_scheduled_tokens
            assert last <= min(len(sequence.table) * BLOCK_SIZE, sequence.num_tokens)
        for sequence in decoding_before:  # the decode share: in the plan, unless preempted
            assert sequence in plan.scheduled or sequence.status is SeqStatus.PREEMPTED

    def step(self) -> bool:
        decoding = [
            s
            for s in self.scheduler.running
            if s.status is SeqStatus.RUNNING and s.num_uncomputed_tokens == 1
        ]
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.check(plan, decoding)
        for sequence in plan.scheduled:
            sequence.num_computed_tokens += sequence.num_scheduled_tokens
            if sequence.num_uncomputed_tokens == 0:
                sequence.append_token(1)
                self.left[sequence] -= 1
                if not self.left[sequence] or sequence.mode is SequenceMode.PREFILL_ONLY:
                    self.finish(sequence)
        self.kv.check_integrity()
        return True

    def finish(self, sequence: Sequence) -> None:
        del self.left[sequence]
        self.scheduler.remove(sequence)
        sequence.move_to(SeqStatus.FINISHED)
        assert sequence.table is not None
        self.kv.free(sequence.table)


@settings(max_examples=120, deadline=None)
@given(
    arrivals=ARRIVALS,
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    watermark=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_budget_holds_decodes_advance_and_nobody_starves(
    arrivals: list[Arrival], budget: int, max_num_seqs: int, watermark: float
) -> None:
    model = SchedulerModel(budget, max_num_seqs, watermark)
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
