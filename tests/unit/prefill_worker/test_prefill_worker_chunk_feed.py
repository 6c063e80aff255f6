from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.prefill_worker.chunk_feed import BlockRange, ChunkFeed, num_final_blocks


@pytest.mark.parametrize(
    ("computed", "total", "expected"),
    [(0, 10, 0), (3, 10, 0), (4, 10, 1), (9, 10, 2), (10, 10, 3), (8, 8, 2), (1, 1, 1)],
)
def test_a_block_is_final_when_full_and_the_last_with_the_prompt(
    computed: int, total: int, expected: int
) -> None:
    assert num_final_blocks(computed, total, 4) == expected


def test_blocks_that_the_decode_instance_has_are_left_out() -> None:
    feed = ChunkFeed(num_tokens=18, block_size=4, first_block=2)
    assert feed.take(8) is None
    assert feed.take(13) == BlockRange(2, 3, is_last=False)
    assert feed.take(13) is None
    assert feed.take(18) == BlockRange(3, 5, is_last=True)
    assert feed.take(18) is None


@given(
    num_tokens=st.integers(1, 300),
    block_size=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_every_block_is_sent_once_in_order_and_never_before_it_is_final(
    num_tokens: int, block_size: int, data: st.DataObject
) -> None:
    num_blocks = -(-num_tokens // block_size)
    first_block = data.draw(st.integers(0, num_blocks - 1))
    chunks = data.draw(st.lists(st.integers(1, 40), max_size=40))
    feed = ChunkFeed(num_tokens, block_size, first_block)
    sent: list[int] = []
    computed = 0
    for size in [*chunks, num_tokens]:
        computed = min(num_tokens, computed + size)
        blocks = feed.take(computed)
        if blocks is None:
            continue
        assert blocks.first < blocks.stop
        sent.extend(range(blocks.first, blocks.stop))
        assert blocks.stop * block_size <= computed or computed == num_tokens
        assert blocks.is_last == (blocks.stop == num_blocks)
    assert sent == list(range(first_block, num_blocks))
