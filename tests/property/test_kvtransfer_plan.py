"""Bytes land where a numpy model says, for any block lists, block sizes and numbers of ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import KvLayout, head_ranges
from isthmus.kvtransfer.plan import Side, first_needed, plan_copies, shared_heads
from tests.support.transfer_pair import LAYOUT

NUM_BLOCKS = 12
UNTOUCHED = 255
Bytes = npt.NDArray[np.uint8]


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


def sides(block_pairs: list[tuple[int, int]]) -> tuple[Side, Side]:
    source, target = ([BlockId(pair[i]) for pair in block_pairs] for i in (0, 1))
    return Side(LAYOUT, source), Side(LAYOUT, target)


@given(pairs())
def test_copies_equal_the_model(block_pairs: list[tuple[int, int]]) -> None:
    size = LAYOUT.block_bytes
    source = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * size, dtype=np.uint8)
    target = np.zeros_like(source)
    model = target.copy().reshape(NUM_BLOCKS, size)
    for source_block, target_block in block_pairs:
        model[target_block] = source.reshape(NUM_BLOCKS, size)[source_block]
    tokens = range(len(block_pairs) * LAYOUT.block_size)
    ops = plan_copies(*sides(block_pairs), tokens)
    for op in ops:
        target[op.target_offset : op.target_offset + op.num_bytes] = source[
            op.source_offset : op.source_offset + op.num_bytes
        ]
    assert target.tobytes() == model.tobytes()
    assert ops.num_bytes == len(block_pairs) * size


@given(pairs())
def test_no_two_copies_could_be_one(block_pairs: list[tuple[int, int]]) -> None:
    ops = plan_copies(*sides(block_pairs), range(len(block_pairs) * LAYOUT.block_size))
    for first, second in pairwise(ops):
        joins_source = first.source_offset + first.num_bytes == second.source_offset
        joins_target = first.target_offset + first.num_bytes == second.target_offset
        assert not (joins_source and joins_target)


@dataclass(frozen=True)
class Instance:
    """All ranks of one instance: what lies where in their stores."""

    ranks: tuple[KvLayout, ...]
    block_ids: tuple[BlockId, ...]
    first_token: int

    @property
    def block_size(self) -> int:
        return self.ranks[0].block_size

    def side(self, rank: int) -> Side:
        return Side(self.ranks[rank], self.block_ids, self.first_token)

    def stores(self) -> list[Bytes]:
        """[N · bytes of a block] per rank."""
        return [
            np.full(NUM_BLOCKS * layout.block_bytes, UNTOUCHED, dtype=np.uint8)
            for layout in self.ranks
        ]

    def vectors(self, rank: int, store: Bytes, token: int) -> list[Bytes]:
        """[L, G, bytes] of one token in each plane, as views."""
        layout = self.ranks[rank]
        index, slot = divmod(token - self.first_token, self.block_size)
        layers = store.reshape(NUM_BLOCKS, layout.num_layers, -1)[self.block_ids[index]]
        vectors = []
        for plane in layout.planes:
            size = layout.num_kv_heads * layout.block_size * plane.vector_bytes
            part = layers[:, plane.offset : plane.offset + size]
            shape = (layout.num_layers, layout.num_kv_heads, layout.block_size, -1)
            vectors.append(part.reshape(shape)[:, :, slot])
        return vectors


@st.composite
def instances(draw: st.DrawFn, like: KvLayout, num_tokens: int, first: int) -> Instance:
    """Blocks of a size of its own that hold the tokens from ``first`` or a little before on."""
    size = draw(st.sampled_from([4, 8, 16]))
    heads = like.model_kv_heads
    tp_size = draw(st.sampled_from([n for n in (1, 2, 4) if n <= heads or n % heads == 0]))
    first_token = draw(st.integers(0, first // size)) * size
    num_blocks = -(-(num_tokens - first_token) // size)
    block_ids = draw(st.permutations(range(NUM_BLOCKS)))[:num_blocks]
    return Instance(
        tuple(
            replace(
                like,
                block_size=size,
                num_kv_heads=len(own),
                total_kv_heads=heads,
                tp_rank=rank,
                tp_size=tp_size,
            )
            for rank, own in enumerate(head_ranges(heads, tp_size))
        ),
        tuple(BlockId(block) for block in block_ids),
        first_token,
    )


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Instance, Instance, range]:
    kind = draw(st.sampled_from(["mha", "mha", "mla"]))
    like = KvLayout(
        "model",
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=1 if kind == "mla" else draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([1, 3])),
        block_size=4,
        dtype=draw(st.sampled_from(["bfloat16", "int8"])),
        kind=kind,
        windows=draw(st.sampled_from([(), (5,), (0, 9), (17, 0, 3)])),
    )
    like = replace(like, windows=like.windows[: like.num_layers])
    num_tokens = draw(st.integers(1, 40))
    start = draw(st.integers(0, num_tokens - 1))
    source = draw(instances(like, num_tokens, start))
    target = draw(instances(like, num_tokens, start))
    return source, target, range(start, num_tokens)


def copy_all(
    source: Instance,
    target: Instance,
    tokens: range,
    stores: list[Bytes],
    windowed: bool,
    layer_cuts: set[int],
) -> list[Bytes]:
    """The target's stores after every pair of ranks has carried out its plans, one for the layers
    between any two neighbouring cuts."""
    num_layers = target.ranks[0].num_layers
    edges = sorted({0, num_layers} | {cut for cut in layer_cuts if cut < num_layers})
    results = target.stores()
    needed = first_needed(target.ranks[0], tokens.stop) if windowed else None
    written = [np.zeros(store.size, dtype=np.int64) for store in results]
    for s, store in enumerate(stores):
        for t, result in enumerate(results):
            for layers in itertools.starmap(range, pairwise(edges)):
                for op in plan_copies(source.side(s), target.side(t), tokens, needed, layers):
                    end = op.target_offset + op.num_bytes
                    result[op.target_offset : end] = store[
                        op.source_offset : op.source_offset + op.num_bytes
                    ]
                    written[t][op.target_offset : end] += 1
    assert all(counts.max(initial=0) <= 1 for counts in written), "a byte was written twice"
    return results


@given(transfers(), st.booleans(), st.sets(st.integers(1, 2)))
@settings(max_examples=150, deadline=None)
def test_every_token_lands_whole_on_every_rank(
    transfer: tuple[Instance, Instance, range], windowed: bool, layer_cuts: set[int]
) -> None:
    source, target, tokens = transfer
    like = source.ranks[0]
    random = np.random.default_rng(1)
    kv = [  # [T, L, H, bytes] of each plane
        random.integers(
            *(0, UNTOUCHED),
            (tokens.stop, like.num_layers, like.model_kv_heads, plane.vector_bytes),
            dtype=np.uint8,
        )
        for plane in like.planes
    ]
    stores = source.stores()
    for rank, (layout, store) in enumerate(zip(source.ranks, stores, strict=True)):
        own = slice(layout.heads.start, layout.heads.stop)
        for token in range(source.first_token, tokens.stop):
            for there, plane in zip(source.vectors(rank, store, token), kv, strict=True):
                there[:] = plane[token][:, own]
    results = copy_all(source, target, tokens, stores, windowed, layer_cuts)

    needed = first_needed(like, tokens.stop) if windowed else np.zeros(like.num_layers)
    for rank, (layout, result) in enumerate(zip(target.ranks, results, strict=True)):
        others, own = result.copy(), slice(layout.heads.start, layout.heads.stop)
        for token in range(target.first_token, tokens.stop):
            block_end = (token // layout.block_size + 1) * layout.block_size
            moved = (block_end > needed) & (token >= tokens.start)  # [L]
            for there, plane in zip(target.vectors(rank, result, token), kv, strict=True):
                expected = np.where(moved[:, None, None], plane[token][:, own], UNTOUCHED)
                assert (there == expected).all(), token
            for there in target.vectors(rank, others, token):
                there[:] = UNTOUCHED
        last = target.block_ids[-1]  # its slots behind the last token are undefined
        others.reshape(NUM_BLOCKS, -1)[last] = UNTOUCHED
        assert (others == UNTOUCHED).all()


@given(transfers())
@settings(deadline=None)
def test_no_copy_between_unlike_blocks_could_be_joined(
    transfer: tuple[Instance, Instance, range],
) -> None:
    source, target, tokens = transfer
    for first, second in pairwise(plan_copies(source.side(0), target.side(0), tokens)):
        joins_source = first.source_offset + first.num_bytes == second.source_offset
        joins_target = first.target_offset + first.num_bytes == second.target_offset
        assert not (joins_source and joins_target)


@given(st.integers(1, 8), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_each_head_of_a_target_rank_comes_from_one_source_rank(
    heads: int, source_size: int, target_size: int
) -> None:
    for size in (source_size, target_size):
        if size > heads and size % heads:
            return

    def layout(rank: int, size: int) -> KvLayout:
        own = len(head_ranges(heads, size)[rank])
        return replace(LAYOUT, num_kv_heads=own, total_kv_heads=heads, tp_rank=rank, tp_size=size)

    for t in range(target_size):
        target = layout(t, target_size)
        sent = [
            head
            for s in range(source_size)
            for head in shared_heads(layout(s, source_size), target)
        ]
        assert sorted(sent) == list(target.heads)
