"""From a StepPlan to the arrays of one forward pass. Python runs per sequence, numpy per token.

::

    rows of T      chunk of sequence 0 | chunk of sequence 1 | …
    rows of K      (prompt rows of 0, when its prompt log-probabilities are wanted) last row of 0,
                   when that completes its tokens | the same of 1 | …

A token that a step in flight has yet to sample is not on the host: its row of ``input_ids`` is 0,
and ``sources`` says which token of the step before belongs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.engine.models.types import ForwardBatch
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.sequence import Sequence

KNOWN = -1  # in ``sources``: the token is in ``input_ids``


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logits rows ``first_row …`` predict the prompt's tokens ``first_token …``, in order."""

    sequence: Sequence
    first_row: int
    first_token: int
    count: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One forward pass, on the host, and what its logits [K, V] are for."""

    input_ids: NDArray[np.int64]  # [T]
    sources: NDArray[np.int64]  # [T], KNOWN or an index into what the step before samples
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T]
    query_start: NDArray[np.int32]  # [S + 1]
    seq_lens: NDArray[np.int32]  # [S]
    block_table: NDArray[np.int32]  # [S, M], padded with the null block
    logits_index: NDArray[np.int64]  # [K]
    max_query_len: int
    max_seq_len: int
    sampled: list[Sequence]  # sequences that get a token
    sample_rows: list[int]  # the logits row of each
    sample_positions: list[int]  # the index that the token will have in each
    prompt_rows: list[PromptRows]

    @property
    def has_unknown_tokens(self) -> bool:
        return bool((self.sources != KNOWN).any())

    def output_index(self, row: int) -> int:
        """The index among its sequence's outputs of the token that ``sampled[row]`` gets."""
        return self.sample_positions[row] - self.sampled[row].request.num_prompt_tokens


def build_step_input(
    plan: StepPlan, block_size: int, sampled_before: Mapping[Sequence, int] | None = None
) -> StepInput:
    """Reads the plan's sequences and their block tables; changes nothing.

    ``sampled_before`` says where the tokens are that the step before samples."""
    sequences = plan.scheduled
    counts = np.array(plan.counts, dtype=np.int64)  # [S]
    starts = np.array(plan.starts, dtype=np.int64)  # [S]
    query_start = np.zeros(len(sequences) + 1, dtype=np.int32)  # [S + 1]
    np.cumsum(counts, out=query_start[1:])
    seq_lens = starts + counts  # [S]
    max_seq_len, max_query_len = int(seq_lens.max()), int(counts.max())
    block_table = _block_table(sequences, -(-max_seq_len // block_size))  # [S, M]
    if max_query_len == 1:
        owners, positions = np.arange(len(sequences)), starts
    else:
        owners = np.repeat(np.arange(len(sequences)), counts)  # [T]
        positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[owners]  # [T]
    blocks = block_table[owners, positions // block_size].astype(np.int64)
    if plan.num_prefill_tokens:
        input_ids, sources = _input_ids(plan, query_start, sampled_before or {})
        rows = _LogitsRows.of(plan, query_start)
    else:
        input_ids, sources = _decode_ids(plan, sampled_before or {})
        rows = _LogitsRows.of_decodes(plan)
    return StepInput(
        input_ids=input_ids,
        sources=sources,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_start=query_start,
        seq_lens=seq_lens.astype(np.int32),
        block_table=block_table,
        logits_index=np.array(rows.index, dtype=np.int64),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        sampled=rows.sampled,
        sample_rows=rows.sample_rows,
        sample_positions=rows.sample_positions,
        prompt_rows=rows.prompt_rows,
    )


def forward_batch(step: StepInput) -> ForwardBatch:
    """The step as CPU tensors over the same memory."""
    return ForwardBatch(
        input_ids=torch.from_numpy(step.input_ids),
        positions=torch.from_numpy(step.positions),
        slot_mapping=torch.from_numpy(step.slot_mapping),
        query_start=torch.from_numpy(step.query_start),
        seq_lens=torch.from_numpy(step.seq_lens),
        block_table=torch.from_numpy(step.block_table),
        logits_index=torch.from_numpy(step.logits_index),
        max_query_len=step.max_query_len,
        max_seq_len=step.max_seq_len,
    )


def _block_table(sequences: tuple[Sequence, ...], width: int) -> NDArray[np.int32]:
    """[S, M] int32, padded with the null block."""
    block_table = np.zeros((len(sequences), width), dtype=np.int32)
    for row, sequence in zip(block_table, sequences, strict=True):
        assert sequence.table is not None
        length = min(len(sequence.table), width)
        row[:length] = sequence.table.row[:length]
    return block_table


def _input_ids(
    plan: StepPlan, query_start: NDArray[np.int32], sampled_before: Mapping[Sequence, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of the rows, and for those not known yet where they will be."""
    input_ids = np.zeros(query_start[-1], dtype=np.int64)  # [T]
    sources = np.full_like(input_ids, KNOWN)
    row = 0
    for sequence, start, count in zip(plan.scheduled, plan.starts, plan.counts, strict=True):
        known = sequence.token_ids[start : start + count]
        input_ids[row : row + len(known)] = known
        row += count
        if len(known) < count:  # the last one: a step samples at most one token of a sequence
            sources[row - 1] = sampled_before[sequence]
    return input_ids, sources


def _decode_ids(
    plan: StepPlan, sampled_before: Mapping[Sequence, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``_input_ids`` where every sequence runs one token."""
    tokens = [s.token_at(start) for s, start in zip(plan.scheduled, plan.starts, strict=True)]
    sources = np.full(len(tokens), KNOWN, dtype=np.int64)
    if None in tokens:
        for row, token in enumerate(tokens):
            if token is None:
                tokens[row] = 0
                sources[row] = sampled_before[plan.scheduled[row]]
    return np.array(tokens, dtype=np.int64), sources


@dataclass(slots=True)
class _LogitsRows:
    index: list[int]  # rows of [T]
    sampled: list[Sequence]
    sample_rows: list[int]
    sample_positions: list[int]
    prompt_rows: list[PromptRows]

    @classmethod
    def of_decodes(cls, plan: StepPlan) -> _LogitsRows:
        """Every row is the last one of its sequence."""
        rows = list(range(len(plan.scheduled)))
        return cls(rows, list(plan.scheduled), rows, [start + 1 for start in plan.starts], [])

    @classmethod
    def of(cls, plan: StepPlan, query_start: NDArray[np.int32]) -> _LogitsRows:
        rows = cls([], [], [], [], [])
        first_rows = query_start.tolist()
        for index, (sequence, start, count) in enumerate(
            zip(plan.scheduled, plan.starts, plan.counts, strict=True)
        ):
            if sequence.wants_prompt_logprobs:
                rows.add_prompt(sequence, start, count, first_rows[index])
            if plan.samples[index]:
                rows.sampled.append(sequence)
                rows.sample_rows.append(len(rows.index))
                rows.sample_positions.append(start + count)
                rows.index.append(first_rows[index] + count - 1)
        return rows

    def add_prompt(self, sequence: Sequence, start: int, count: int, first_row: int) -> None:
        """The row of a token predicts the next one; those of resumed outputs are not wanted."""
        last = min(start + count, sequence.request.num_prompt_tokens - 1)  # one past the last row
        if last > start:
            self.prompt_rows.append(PromptRows(sequence, len(self.index), start + 1, last - start))
            self.index.extend(range(first_row, first_row + last - start))
