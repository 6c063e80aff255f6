"""Bytes land where a numpy model says, for any block lists."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.ids import BlockId
from isthmus.kvtransfer.plan import plan_copies
from tests.support.transfer_pair import LAYOUT

NUM_BLOCKS = 12


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Runs of neighbours and lone blocks mixed; targets are distinct, sources need not be."""
    targets = draw(st.permutations(range(NUM_BLOCKS)))[: draw(st.integers(0, NUM_BLOCKS))]
    if draw(st.booleans()):
        targets = sorted(targets)
    shift = draw(st.integers(0, NUM_BLOCKS - 1))
    if draw(st.booleans()):
        return [((target + shift) % NUM_BLOCKS, target) for target in targets]
    return [(draw(st.integers(0, NUM_BLOCKS - 1)), target) for target in targets]


@given(pairs())
def test_copies_equal_the_model(block_pairs: list[tuple[int, int]]) -> None:
    size = LAYOUT.block_bytes
    source = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * size, dtype=np.uint8)
    target = np.zeros_like(source)
    model = target.copy().reshape(NUM_BLOCKS, size)
    for source_block, target_block in block_pairs:
        model[target_block] = source.reshape(NUM_BLOCKS, size)[source_block]
    source_ids = [BlockId(block) for block, _ in block_pairs]
    target_ids = [BlockId(block) for _, block in block_pairs]
    ops = plan_copies(LAYOUT, LAYOUT, source_ids, target_ids)
    for op in ops:
        target[op.target_offset : op.target_offset + op.num_bytes] = source[
            op.source_offset : op.source_offset + op.num_bytes
        ]
    assert target.tobytes() == model.tobytes()
    assert sum(op.num_bytes for op in ops) == len(block_pairs) * size


@given(pairs())
def test_no_two_copies_could_be_one(block_pairs: list[tuple[int, int]]) -> None:
    source_ids = [BlockId(block) for block, _ in block_pairs]
    target_ids = [BlockId(block) for _, block in block_pairs]
    ops = plan_copies(LAYOUT, LAYOUT, source_ids, target_ids)
    for first, second in pairwise(ops):
        joins_source = first.source_offset + first.num_bytes == second.source_offset
        joins_target = first.target_offset + first.num_bytes == second.target_offset
        assert not (joins_source and joins_target)
