from __future__ import annotations

import numpy as np
import pytest

from isthmus.common.ids import BlockId
from isthmus.engine.batch import build_step_input
from isthmus.engine.block_table import BlockTable, TableState
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.sequence import Sequence
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import make_prompt, make_request

BLOCK_SIZE = 4


def make_sequence(
    num_tokens: int, computed: int, scheduled: int, first_block: int, **sampling: object
) -> Sequence:
    request = make_request(f"r{first_block}", make_prompt(num_tokens, first_block), **sampling)
    sequence = Sequence(request, SequenceMode.FULL, [], added_ns=0)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    block_ids = [BlockId(first_block + 2 * i) for i in range(num_blocks)]
    sequence.table = BlockTable(block_ids, 0, TableState.USED)
    sequence.num_computed_tokens = computed
    sequence.num_scheduled_tokens = scheduled
    return sequence


def plan_of(*sequences: Sequence) -> StepPlan:
    return StepPlan(0, sequences, 0, 0, 0)


def test_batch_equals_a_token_by_token_construction() -> None:
    sequences = [
        make_sequence(9, 8, 1, first_block=1),  # decode into a fresh block
        make_sequence(20, 3, 10, first_block=20),  # chunk in the middle
        make_sequence(7, 0, 7, first_block=50),  # a whole prompt
    ]
    step = build_step_input(plan_of(*sequences), BLOCK_SIZE, "cpu").forward
    input_ids, positions, slots, last_rows = [], [], [], []
    for sequence in sequences:
        assert sequence.table is not None
        first = sequence.num_computed_tokens
        for position in range(first, first + sequence.num_scheduled_tokens):
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


@pytest.mark.parametrize(
    ("computed", "scheduled", "rows", "first_token", "is_sampled"),
    [(0, 4, [0, 1, 2, 3], 1, False), (4, 4, [0, 1, 2, 3], 5, False), (8, 2, [0, 1], 9, True)],
)
def test_rows_of_prompt_logprobs_predict_the_tokens_after_them(
    computed: int, scheduled: int, rows: list[int], first_token: int, is_sampled: bool
) -> None:
    sequence = make_sequence(10, computed, scheduled, 1, prompt_logprobs=0)
    step = build_step_input(plan_of(sequence), BLOCK_SIZE, "cpu")
    (prompt_rows,) = step.prompt_rows
    assert step.forward.logits_index.tolist() == rows
    assert prompt_rows.first_token == first_token
    assert prompt_rows.count == len(rows) - is_sampled
    assert step.sample_rows == ([1] if is_sampled else [])


def test_long_outputs_outgrow_the_first_buffers() -> None:
    sequence = make_sequence(3, 0, 3, first_block=1)
    for token_id in range(300):
        sequence.append_token(token_id % 64)
    assert sequence.num_output_tokens == 300
    assert np.array_equal(sequence.output_token_ids, np.arange(300) % 64)
    assert sequence.token_ids[:3].tolist() == list(make_prompt(3, 1))
