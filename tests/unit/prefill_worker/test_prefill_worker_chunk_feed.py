from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.prefill_worker.chunk_feed import (
    LEAST_PIECE_BYTES,
    ChunkFeed,
    LayerSteps,
    Piece,
    num_final_blocks,
)

WHOLE = LayerSteps(num_layers=1, layer_bytes=8)
ALL = range(1)


@pytest.mark.parametrize(
    ("computed", "total", "expected"),
    [(0, 10, 0), (3, 10, 0), (4, 10, 1), (9, 10, 2), (10, 10, 3), (8, 8, 2), (1, 1, 1)],
)
def test_a_block_is_final_when_full_and_the_last_with_the_prompt(
    computed: int, total: int, expected: int
) -> None:
    assert num_final_blocks(computed, total, 4) == expected


def test_blocks_that_the_decode_instance_has_are_left_out() -> None:
    feed = ChunkFeed(num_tokens=18, block_size=4, first_block=2, layers=WHOLE)
    assert feed.land(8) == []
    assert feed.land(13) == [Piece(2, 3, ALL)]
    assert feed.land(13) == []
    assert feed.land(18) == [Piece(3, 5, ALL, is_last=True)]
    assert feed.land(18) == []


def test_a_step_sends_all_but_its_last_layers_while_it_runs() -> None:
    layers = LayerSteps(num_layers=7, layer_bytes=8, layers_per_push=3)
    feed = ChunkFeed(num_tokens=18, block_size=4, first_block=0, layers=layers)
    assert feed.launch(13) == [Piece(0, 3, range(3)), Piece(0, 3, range(3, 6))]
    assert feed.land(13) == [Piece(0, 3, range(6, 7))]
    assert [piece.is_last for piece in feed.launch(18)] == [False, False]
    assert feed.land(18) == [Piece(3, 5, range(6, 7), is_last=True)]


def test_a_step_that_fills_no_block_sends_nothing() -> None:
    feed = ChunkFeed(18, 4, 0, LayerSteps(num_layers=2, layer_bytes=8, layers_per_push=1))
    assert feed.launch(3) == feed.land(3) == []
    assert feed.launch(6) == [Piece(0, 1, range(1))]


def test_what_is_launched_before_the_last_step_has_landed_keeps_its_turn() -> None:
    feed = ChunkFeed(12, 4, 0, LayerSteps(num_layers=2, layer_bytes=8, layers_per_push=1))
    assert feed.launch(8) == [Piece(0, 2, range(1))]
    assert feed.launch(12) == [Piece(2, 3, range(1))]
    assert feed.land(8) == [Piece(0, 2, range(1, 2))]
    assert feed.land(12) == [Piece(2, 3, range(1, 2), is_last=True)]


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [
        (1, [30]),  # 360 KiB: one piece
        (16, [6, 6, 6, 6, 6]),  # 192 KiB a layer
        (32, [3] * 10),
        (2000, [1] * 30),
    ],
)
def test_pieces_stay_large(num_blocks: int, sizes: list[int]) -> None:
    layer_bytes = 12 * 1024  # SmolLM2-135M, blocks of 16 in bf16
    groups = LayerSteps(30, layer_bytes).groups(num_blocks)
    assert [len(group) for group in groups] == sizes
    assert all(num_blocks * layer_bytes * len(g) >= LEAST_PIECE_BYTES for g in groups[:-1])


def test_as_many_layers_as_the_model_has_leave_after_the_step() -> None:
    feed = ChunkFeed(8, 4, 0, LayerSteps(num_layers=5, layer_bytes=8, layers_per_push=9))
    assert feed.launch(8) == []
    assert feed.land(8) == [Piece(0, 2, range(5), is_last=True)]


@given(
    num_tokens=st.integers(1, 300),
    block_size=st.sampled_from([1, 4, 16]),
    num_layers=st.integers(1, 7),
    layers_per_push=st.integers(0, 8),
    num_ahead=st.integers(1, 2),
    data=st.data(),
)
def test_every_layer_of_every_block_is_sent_once_and_never_before_it_can_be_final(
    num_tokens: int,
    block_size: int,
    num_layers: int,
    layers_per_push: int,
    num_ahead: int,
    data: st.DataObject,
) -> None:
    num_blocks = -(-num_tokens // block_size)
    first_block = data.draw(st.integers(0, num_blocks - 1))
    sizes = data.draw(st.lists(st.integers(1, 40), max_size=40))
    steps = sorted({min(num_tokens, sum(sizes[: i + 1])) for i in range(len(sizes))} | {num_tokens})
    layers = LayerSteps(num_layers, LEAST_PIECE_BYTES // 8, layers_per_push)
    feed = ChunkFeed(num_tokens, block_size, first_block, layers)
    sent: Counter[tuple[int, int]] = Counter()
    was_last: list[bool] = []

    def send(pieces: list[Piece], num_computed: int) -> None:
        for piece in pieces:
            assert piece.first < piece.stop
            assert piece.stop * block_size <= num_computed or num_computed == num_tokens
            indices = range(piece.first, piece.stop)
            sent.update((index, layer) for index in indices for layer in piece.layers)
            was_last.append(piece.is_last)

    # Up to two steps are launched before the first of them lands.
    for index in range(len(steps) + num_ahead - 1):
        if index < len(steps):
            early = feed.launch(steps[index])
            assert all(num_layers - 1 not in piece.layers for piece in early)
            send(early, steps[index])
        if index >= num_ahead - 1:
            send(feed.land(steps[index - num_ahead + 1]), steps[index - num_ahead + 1])
    blocks = range(first_block, num_blocks)
    assert sent == Counter((index, layer) for index in blocks for layer in range(num_layers))
    assert was_last == [*[False] * (len(was_last) - 1), True]
