"""Buckets and padding of captured decode steps, with graphs that are played on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from isthmus.engine.batch import KNOWN, StepInput
from isthmus.engine.cuda_graphs import (
    DecodeGraphs,
    bucket_of,
    decode_buckets,
    empty_decode,
    pad_decode,
)
from isthmus.engine.device import HostDevice
from isthmus.engine.models.types import ForwardBatch
from isthmus.engine.runners import ops_that_wait
from isthmus.kernels import select
from isthmus.kernels.registry import OpChoice


def decode_of(num_sequences: int) -> StepInput:
    ids = np.arange(num_sequences, dtype=np.int64)
    return replace(
        empty_decode(),
        input_ids=ids + 5,
        sources=np.full(num_sequences, KNOWN),
        positions=ids + 9,
        slot_mapping=ids + 100,
        query_start=np.arange(num_sequences + 1, dtype=np.int32),
        seq_lens=(ids + 10).astype(np.int32),
        block_table=np.full((num_sequences, 3), 7, dtype=np.int32),
        logits_index=ids,
        max_seq_len=num_sequences + 9,
    )


@pytest.mark.parametrize(
    ("max_num_seqs", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (30, (1, 2, 4, 8, 16, 24, 30)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_buckets_end_with_the_largest_batch(max_num_seqs: int, buckets: tuple[int, ...]) -> None:
    assert decode_buckets(max_num_seqs) == buckets


def test_a_step_takes_the_smallest_bucket_that_holds_it() -> None:
    buckets = decode_buckets(30)
    chosen = [bucket_of(decode_of(count), buckets) for count in (1, 2, 3, 5, 9, 25, 30, 31)]
    assert chosen == [1, 2, 4, 8, 16, 30, 30, None]


def test_steps_that_a_graph_does_not_fit_run_eagerly() -> None:
    buckets = decode_buckets(8)
    decode = decode_of(3)
    assert bucket_of(decode, ()) is None
    assert bucket_of(replace(decode, max_query_len=2), buckets) is None
    middle_of_a_prompt = replace(decode, logits_index=np.array([0, 2]))
    assert bucket_of(middle_of_a_prompt, buckets) is None


def test_padding_adds_rows_that_write_nothing_and_read_the_null_block() -> None:
    step = decode_of(5)
    padded = pad_decode(step, 8)
    for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table"):
        assert np.array_equal(getattr(padded, name)[:5], getattr(step, name))
        assert getattr(padded, name).dtype == getattr(step, name).dtype
    assert padded.slot_mapping[5:].tolist() == [-1] * 3
    assert padded.seq_lens[5:].tolist() == [1] * 3
    assert not padded.block_table[5:].any()
    assert padded.sources[5:].tolist() == [KNOWN] * 3
    assert padded.query_start.tolist() == list(range(9))
    assert padded.logits_index.tolist() == list(range(8))
    assert pad_decode(step, 5) is step


def test_graphs_are_captured_largest_first_and_read_their_buffers_at_replay() -> None:
    ids = torch.zeros(8, dtype=torch.int64)
    captured: list[int] = []

    def batch_of(bucket: int) -> ForwardBatch:
        captured.append(bucket)
        lengths = torch.ones(bucket, dtype=torch.int32)
        starts = torch.arange(bucket + 1, dtype=torch.int32)
        table = torch.zeros(bucket, 1, dtype=torch.int32)
        row = torch.arange(bucket)
        return ForwardBatch(ids[:bucket], row, row - 1, starts, lengths, table, row, 1, 1)

    def forward(batch: ForwardBatch) -> torch.Tensor:
        return batch.input_ids[:, None] * torch.ones(3)  # [bucket, 3]

    graphs = DecodeGraphs(HostDevice(), (1, 4, 8), 3, forward, batch_of)
    assert captured == [8, 4, 1]
    ids[:4] = torch.tensor([3, 1, 2, 9])
    first = graphs.replay(4)
    assert first[:, 0].tolist() == [3, 1, 2, 9]
    ids[0] = 6
    assert graphs.replay(4).data_ptr() == first.data_ptr()
    assert first[:, 0].tolist() == [6, 1, 2, 9]
    assert graphs.replay(1)[:, 0].tolist() == [6]


def test_kernels_that_look_at_the_device_are_not_captured() -> None:
    reference = select("cpu", 1, "reference").choices
    assert ops_that_wait(reference) == ["rope_and_cache", "paged_attention"]
    triton = [OpChoice(choice.op, "triton", "first choice") for choice in reference]
    assert ops_that_wait(triton) == []
