"""Drives a LanguageModel over paged KV blocks the way an engine does, without an engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from isthmus.engine.models.types import ForwardBatch, LanguageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PagedSequences:
    """Sequences that own shuffled blocks of one KV tensor.

    KV starts as NaN: a slot that is read before it was written poisons the logits.
    """

    def __init__(
        self,
        model: LanguageModel,
        num_sequences: int = 1,
        max_len: int = 64,
        block_size: int = 4,
        device: str = "cpu",
    ) -> None:
        spec = model.spec
        self.model = model
        self.block_size = block_size
        blocks_each = -(-max_len // block_size)
        ids = list(range(1, 1 + num_sequences * blocks_each))
        random.Random(7).shuffle(ids)
        self.tables = [ids[i * blocks_each : (i + 1) * blocks_each] for i in range(num_sequences)]
        self.num_computed = [0] * num_sequences
        shape = (len(ids) + 1, spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
        self.kv = torch.full(shape, float("nan"), dtype=DTYPES[spec.dtype], device=device)

    def step(
        self,
        scheduled: Mapping[int, Sequence[int]],
        wanted: Literal["all", "last", "none"] = "all",
    ) -> dict[int, torch.Tensor]:
        """Runs the given next tokens of the given sequences.

        Returns each sequence's logits: of all these tokens, of the last or of none of them.
        """
        ids, positions, slots, starts, lengths = [], [], [], [0], []
        for index, tokens in scheduled.items():
            first = self.num_computed[index]
            table = self.tables[index]
            for offset, token in enumerate(tokens):
                position = first + offset
                block = table[position // self.block_size]
                ids.append(token)
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(ids))
            self.num_computed[index] = first + len(tokens)
            lengths.append(self.num_computed[index])
        spans = [range(*pair) for pair in itertools.pairwise(starts)]
        spans = [{"all": span, "last": span[-1:], "none": span[:0]}[wanted] for span in spans]
        rows = [row for span in spans for row in span]
        width = max(-(-length // self.block_size) for length in lengths)
        tables = [(self.tables[index] + [0] * width)[:width] for index in scheduled]
        logits = self.model.forward(
            self._batch(ids, positions, slots, starts, lengths, tables, rows), self.kv
        )
        return dict(zip(scheduled, logits.split([len(span) for span in spans]), strict=True))

    def run(self, index: int, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Runs ``tokens`` of one sequence in pieces of the given sizes; logits [tokens, V]."""
        assert sum(chunks) == len(tokens)
        pieces, start = [], 0
        for size in chunks:
            pieces.append(self.step({index: tokens[start : start + size]})[index])
            start += size
        return torch.cat(pieces)

    def greedy(self, index: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
        output: list[int] = []
        pending: Sequence[int] = prompt
        for _ in range(num_tokens):
            logits = self.step({index: pending}, "last")[index]
            output.append(int(logits[0].argmax()))
            pending = output[-1:]
        return output

    def _batch(
        self,
        ids: list[int],
        positions: list[int],
        slots: list[int],
        starts: list[int],
        lengths: list[int],
        tables: list[list[int]],
        rows: list[int],
    ) -> ForwardBatch:
        device = self.kv.device

        def tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return ForwardBatch(
            input_ids=tensor(ids, torch.int64),
            positions=tensor(positions, torch.int64),
            slot_mapping=tensor(slots, torch.int64),
            query_start=tensor(starts, torch.int32),
            seq_lens=tensor(lengths, torch.int32),
            block_table=tensor(tables, torch.int32),
            logits_index=tensor(rows, torch.int64),
            max_query_len=max(b - a for a, b in itertools.pairwise(starts)),
            max_seq_len=max(lengths),
        )
