"""From a StepPlan to the tensors of one forward pass. Python runs per sequence, numpy per token.

::

    rows of T      chunk of sequence 0 | chunk of sequence 1 | …
    rows of K      (prompt rows of 0, when its prompt log-probabilities are wanted) last row of 0,
                   when that completes its tokens | the same of 1 | …
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.engine.models.types import ForwardBatch
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logits rows ``first_row …`` predict the prompt's tokens ``first_token …``, in order."""

    sequence: Sequence
    first_row: int
    first_token: int
    count: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """The forward pass and what its logits [K, V] are for."""

    forward: ForwardBatch
    sampled: list[Sequence]  # sequences that get a token
    sample_rows: list[int]  # the logits row of each
    prompt_rows: list[PromptRows]


def build_step_input(plan: StepPlan, block_size: int, device: str) -> StepInput:
    """Reads the plan's sequences and their block tables; changes nothing."""
    sequences = plan.scheduled
    counts = np.array([s.num_scheduled_tokens for s in sequences], dtype=np.int64)  # [S]
    starts = np.array([s.num_computed_tokens for s in sequences], dtype=np.int64)  # [S]
    query_start = np.zeros(len(sequences) + 1, dtype=np.int32)  # [S + 1]
    np.cumsum(counts, out=query_start[1:])
    seq_lens = starts + counts  # [S]
    block_table = _block_table(sequences, -(-int(seq_lens.max()) // block_size))  # [S, M]
    owners = np.repeat(np.arange(len(sequences)), counts)  # [T]
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[owners]  # [T]
    slots = (
        block_table[owners, positions // block_size].astype(np.int64) * block_size
        + positions % block_size
    )
    rows = _LogitsRows.of(sequences, query_start)

    def on_device(array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    forward = ForwardBatch(
        input_ids=on_device(_input_ids(sequences, query_start)),
        positions=on_device(positions),
        slot_mapping=on_device(slots),
        query_start=on_device(query_start),
        seq_lens=on_device(seq_lens.astype(np.int32)),
        block_table=on_device(block_table),
        logits_index=on_device(np.array(rows.index, dtype=np.int64)),
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return StepInput(forward, rows.sampled, rows.sample_rows, rows.prompt_rows)


def _block_table(sequences: tuple[Sequence, ...], width: int) -> NDArray[np.int32]:
    """[S, M] int32, padded with the null block."""
    block_table = np.zeros((len(sequences), width), dtype=np.int32)
    for row, sequence in zip(block_table, sequences, strict=True):
        assert sequence.table is not None
        length = min(len(sequence.table), width)
        row[:length] = sequence.table.row[:length]
    return block_table


def _input_ids(
    sequences: tuple[Sequence, ...], query_start: NDArray[np.int32]
) -> NDArray[np.int64]:
    input_ids = np.empty(query_start[-1], dtype=np.int64)  # [T]
    end = 0
    for sequence in sequences:
        start, end = end, end + sequence.num_scheduled_tokens
        first = sequence.num_computed_tokens
        input_ids[start:end] = sequence.token_ids[first : first + end - start]
    return input_ids


@dataclass(slots=True)
class _LogitsRows:
    index: list[int]  # rows of [T]
    sampled: list[Sequence]
    sample_rows: list[int]
    prompt_rows: list[PromptRows]

    @classmethod
    def of(cls, sequences: tuple[Sequence, ...], query_start: NDArray[np.int32]) -> _LogitsRows:
        rows = cls([], [], [], [])
        for sequence, start in zip(sequences, query_start.tolist(), strict=False):
            if sequence.wants_prompt_logprobs:
                rows.add_prompt(sequence, start)
            if sequence.num_scheduled_tokens == sequence.num_uncomputed_tokens:
                rows.sampled.append(sequence)
                rows.sample_rows.append(len(rows.index))
                rows.index.append(start + sequence.num_scheduled_tokens - 1)
        return rows

    def add_prompt(self, sequence: Sequence, start: int) -> None:
        """The row of a token predicts the next one; those of resumed outputs are not wanted."""
        first = sequence.num_computed_tokens
        last = min(
            first + sequence.num_scheduled_tokens, sequence.request.num_prompt_tokens - 1
        )  # one past the last row
        if last > first:
            count = last - first
            self.prompt_rows.append(PromptRows(sequence, len(self.index), first + 1, count))
            self.index.extend(range(start, start + count))
