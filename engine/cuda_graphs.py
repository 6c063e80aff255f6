"""Decode steps as captured graphs, one for each size of batch: a replay is one launch.

A graph is bound to the shapes and addresses that it was captured with. So there is one for every
*bucket* of sequences; a step takes the smallest that holds it, and the rows beyond are padding:

::

    rows of the step │ token 0 at position 0, slot −1 (writes nothing), length 1, the null block

Lengths and block tables are data. What a kernel's grid depends on is not: graphs are captured for
the longest sequence that there may be. Steps with prompt chunks, or with rows whose logits nobody
wants, are not captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.engine.batch import KNOWN, StepInput
from isthmus.engine.device import Device, Forward
from isthmus.engine.models.types import ForwardBatch

ScalarT = TypeVar("ScalarT", np.int32, np.int64)

_SMALL_BUCKETS = (1, 2, 4)
_BUCKET_STEP = 8


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every eighth; the last one holds any batch."""
    steps = (*_SMALL_BUCKETS, *range(_BUCKET_STEP, max_num_seqs, _BUCKET_STEP))
    return (*(bucket for bucket in steps if bucket < max_num_seqs), max_num_seqs)


def bucket_of(step: StepInput, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds the step; None when it cannot be replayed."""
    num_sequences = len(step.seq_lens)
    has_all_rows = len(step.logits_index) == num_sequences and not step.prompt_rows
    if step.max_query_len > 1 or not has_all_rows or not buckets or num_sequences > buckets[-1]:
        return None
    return buckets[bisect_left(buckets, num_sequences)]


def pad_decode(step: StepInput, bucket: int) -> StepInput:
    """The step with rows of padding up to the bucket; what is wanted of its logits stays."""
    extra = bucket - len(step.seq_lens)
    if extra == 0:
        return step
    return replace(
        step,
        input_ids=_extended(step.input_ids, extra, 0),
        sources=_extended(step.sources, extra, KNOWN),
        positions=_extended(step.positions, extra, 0),
        slot_mapping=_extended(step.slot_mapping, extra, -1),
        query_start=np.arange(bucket + 1, dtype=np.int32),
        seq_lens=_extended(step.seq_lens, extra, 1),
        block_table=np.pad(step.block_table, ((0, extra), (0, 0))),
        logits_index=np.arange(bucket, dtype=np.int64),
    )


def empty_decode() -> StepInput:
    """A decode step of nobody: with ``pad_decode`` what graphs are captured with."""
    ids, lengths = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    return StepInput(
        input_ids=ids,
        sources=ids,
        positions=ids,
        slot_mapping=ids,
        query_start=np.zeros(1, dtype=np.int32),
        seq_lens=lengths,
        block_table=np.zeros((0, 1), dtype=np.int32),
        logits_index=ids,
        max_query_len=1,
        max_seq_len=1,
        sampled=[],
        sample_rows=[],
        sample_positions=[],
        prompt_rows=[],
    )


class DecodeGraphs:
    """One graph a bucket, captured at construction, the largest first: the others fit in its
    memory. All leave their logits in one buffer, or each would keep its own for ever."""

    def __init__(
        self,
        device: Device,
        buckets: tuple[int, ...],
        vocab_size: int,
        forward: Callable[[ForwardBatch], torch.Tensor],
        batch_of: Callable[[int], ForwardBatch],
    ) -> None:
        """``batch_of`` stages a step of padding and gives the bucket's input buffers."""
        self.buckets = buckets
        self._forward = forward
        num_rows = max(buckets, default=0)
        self._logits = torch.zeros(num_rows, vocab_size, device=device.torch_device)
        self._replays: dict[int, Forward] = {}
        for bucket in reversed(buckets):
            self._replays[bucket] = device.capture(partial(self._run, batch_of(bucket)))

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        return self._logits[: len(batch.seq_lens)].copy_(self._forward(batch))

    def replay(self, bucket: int) -> torch.Tensor:
        """Runs the bucket's step on what its input buffers hold; logits float32 [bucket, V], good
        until the next replay."""
        return self._replays[bucket]()


def _extended(array: NDArray[ScalarT], extra: int, value: int) -> NDArray[ScalarT]:
    return np.concatenate((array, np.full(extra, value, dtype=array.dtype)))
