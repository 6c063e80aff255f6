from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from isthmus.common.ids import BlockId
from isthmus.engine.batch import KNOWN, StepInput, build_step_input, forward_batch
from isthmus.engine.block_table import BlockTable, TableState
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.sequence import Sequence
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import make_prompt, make_request

BLOCK_SIZE = 4


def make_sequence(num_tokens: int, computed: int, first_block: int, **sampling: object) -> Sequence:
    request = make_request(f"r{first_block}", make_prompt(num_tokens, first_block), **sampling)
    sequence = Sequence(request, SequenceMode.FULL, [], added_ns=0)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    block_ids = [BlockId(first_block + 2 * i) for i in range(num_blocks)]
    sequence.table = BlockTable(block_ids, 0, TableState.USED)
    sequence.num_computed_tokens = computed
    return sequence


def plan_of(*scheduled: tuple[Sequence, int]) -> StepPlan:
    """Sequences and how many tokens each runs."""
    sequences, counts = zip(*scheduled, strict=True)
    starts, samples = zip(*(s.take_off(count) for s, count in scheduled), strict=True)
    return StepPlan(0, sequences, starts, counts, samples, sum(counts), 0, 0)


def test_batch_equals_a_token_by_token_construction() -> None:
    scheduled = [
        (make_sequence(9, 8, first_block=1), 1),  # decode into a fresh block
        (make_sequence(20, 3, first_block=20), 10),  # chunk in the middle
        (make_sequence(7, 0, first_block=50), 7),  # a whole prompt
    ]
    whole = build_step_input(plan_of(*scheduled), BLOCK_SIZE)
    step = forward_batch(whole)
    input_ids, positions, slots, last_rows = [], [], [], []
    for sequence, count in scheduled:
        assert sequence.table is not None
        first = sequence.num_computed_tokens
        for position in range(first, first + count):
            input_ids.append(sequence.request.token_ids[position])
            positions.append(position)
            block_id = sequence.table.block_ids[position // BLOCK_SIZE]
            slots.append(block_id * BLOCK_SIZE + position % BLOCK_SIZE)
        last_rows.append(len(positions) - 1)
    assert step.input_ids.tolist() == input_ids
    assert step.positions.tolist() == positions
    assert step.slot_mapping.tolist() == slots
    assert step.query_start.tolist() == [0, 1, 11, 18]
    assert step.seq_lens.tolist() == [9, 13, 7]
    assert step.block_table.tolist() == [[1, 3, 5, 0], [20, 22, 24, 26], [50, 52, 0, 0]]
    assert step.logits_index.tolist() == [last_rows[0], last_rows[2]]
    assert (step.max_query_len, step.max_seq_len) == (10, 13)
    dtypes = {name: str(getattr(step, name).dtype) for name in ("input_ids", "query_start")}
    assert dtypes == {"input_ids": "torch.int64", "query_start": "torch.int32"}
    assert whole.sampled == [scheduled[0][0], scheduled[2][0]]
    assert (whole.sample_rows, whole.sample_positions) == ([0, 1], [9, 7])
    assert not whole.has_unknown_tokens


def test_token_that_a_step_in_flight_samples_is_named_by_its_row_there() -> None:
    decode, prompt = make_sequence(9, 8, first_block=1), make_sequence(7, 0, first_block=50)
    newcomer = make_sequence(5, 3, first_block=80)
    build_step_input(plan_of((decode, 1), (prompt, 7)), BLOCK_SIZE)
    for sequence in (decode, prompt):
        assert sequence.table is not None
        sequence.table.extend([BlockId(90), BlockId(91)])
    plan = plan_of((prompt, 1), (decode, 1), (newcomer, 2))
    step = build_step_input(plan, BLOCK_SIZE, {decode: 0, prompt: 1})
    assert step.sources.tolist() == [1, 0, KNOWN, KNOWN]
    assert step.input_ids.tolist() == [0, 0, *newcomer.request.token_ids[3:]]
    assert step.positions.tolist() == [7, 9, 3, 4]
    assert step.sample_positions == [8, 10, 5]
    assert step.has_unknown_tokens


def test_step_of_decodes_alone_is_built_as_any_other() -> None:
    decodes = [make_sequence(5 + i, 4 + i, first_block=1 + 30 * i) for i in range(4)]
    first = build_step_input(plan_of(*((s, 1) for s in decodes[:2])), BLOCK_SIZE)
    rows = {sequence: row for row, sequence in enumerate(first.sampled)}
    for sequence in decodes[:2]:
        assert sequence.table is not None
        sequence.table.extend([BlockId(90)])
    plan = plan_of(*((s, 1) for s in decodes))
    mixed = build_step_input(plan, BLOCK_SIZE, rows)
    alone = build_step_input(
        replace(plan, num_prefill_tokens=0, num_decode_tokens=4), BLOCK_SIZE, rows
    )
    assert mixed.sources.tolist() == [0, 1, KNOWN, KNOWN]
    for field in fields(StepInput):
        expected, actual = getattr(mixed, field.name), getattr(alone, field.name)
        assert np.array_equal(actual, expected), field.name
        assert getattr(actual, "dtype", None) == getattr(expected, "dtype", None)


def test_counts_of_steps_in_flight_add_up() -> None:
    sequence = make_sequence(7, 0, first_block=1, max_tokens=3)
    assert sequence.take_off(4) == (0, False)
    assert sequence.take_off(3) == (4, True)
    assert (sequence.num_schedulable_tokens, sequence.num_expected_tokens) == (1, 8)
    sequence.land(4)
    assert sequence.take_off(1) == (7, True)
    sequence.land(3)
    sequence.land_token(5)
    assert (sequence.num_computed_tokens, sequence.num_tokens_in_flight) == (7, 1)
    assert sequence.take_off(1) == (8, True)
    assert sequence.num_schedulable_tokens == 0  # its third output ends it


def test_prompt_for_another_instance_runs_no_further_than_its_end() -> None:
    request = make_request("r", make_prompt(6))
    sequence = Sequence(request, SequenceMode.PREFILL_ONLY, [], added_ns=0)
    assert sequence.num_schedulable_tokens == 6
    sequence.take_off(6)
    assert sequence.num_schedulable_tokens == 0


@pytest.mark.parametrize(
    ("computed", "scheduled", "rows", "first_token", "is_sampled"),
    [(0, 4, [0, 1, 2, 3], 1, False), (4, 4, [0, 1, 2, 3], 5, False), (8, 2, [0, 1], 9, True)],
)
def test_rows_of_prompt_logprobs_predict_the_tokens_after_them(
    computed: int, scheduled: int, rows: list[int], first_token: int, is_sampled: bool
) -> None:
    sequence = make_sequence(10, computed, 1, prompt_logprobs=0)
    step = build_step_input(plan_of((sequence, scheduled)), BLOCK_SIZE)
    (prompt_rows,) = step.prompt_rows
    assert step.logits_index.tolist() == rows
    assert prompt_rows.first_token == first_token
    assert prompt_rows.count == len(rows) - is_sampled
    assert step.sample_rows == ([1] if is_sampled else [])


def test_long_outputs_outgrow_the_first_buffers() -> None:
    sequence = make_sequence(3, 0, first_block=1)
    for token_id in range(300):
        sequence.append_token(token_id % 64)
    assert sequence.num_output_tokens == 300
    assert np.array_equal(sequence.output_token_ids, np.arange(300) % 64)
    assert sequence.token_ids[:3].tolist() == list(make_prompt(3, 1))
