from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from isthmus.common.errors import LayoutMismatchError
from isthmus.common.kv_layout import KvLayout, head_ranges
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.interface import CopyOp
from isthmus.kvtransfer.plan import (
    Side,
    blocks_of,
    check_plannable,
    first_needed,
    plan_copies,
    shared_heads,
)
from tests.support.transfer_pair import LAYOUT, blocks

SIZE = LAYOUT.block_bytes
BLOCK = LAYOUT.block_size


def plan(source: tuple[int, ...], target: tuple[int, ...]) -> Copies:
    sides = Side(LAYOUT, blocks(*source)), Side(LAYOUT, blocks(*target))
    return plan_copies(*sides, range(len(target) * BLOCK))


def sample(block_size: int, **changes: object) -> KvLayout:
    """SmolLM2-135M's."""
    layout = KvLayout("m", 30, 3, 64, block_size, "bfloat16")
    return replace(layout, **changes)  # type: ignore[arg-type]


def test_neighbours_on_both_sides_become_one_copy() -> None:
    assert tuple(plan((7, 8, 9, 3), (0, 1, 2, 5))) == (
        CopyOp(7 * SIZE, 0, 3 * SIZE),
        CopyOp(3 * SIZE, 5 * SIZE, SIZE),
    )


@pytest.mark.parametrize(
    ("source", "target"),
    [((1, 2), (5, 4)), ((2, 1), (4, 5)), ((1, 3), (4, 5)), ((1, 2), (4, 6)), ((1, 1), (4, 5))],
)
def test_neighbours_on_one_side_only_stay_apart(
    source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    assert len(plan(source, target)) == 2


def test_no_blocks_no_copies() -> None:
    assert len(plan((), ())) == 0


@pytest.mark.parametrize(("source", "target"), [((1,), (1, 2)), ((1, 2), ())])
def test_blocks_that_do_not_hold_the_tokens_are_a_bug(
    source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="do not hold"):
        plan_copies(Side(LAYOUT, blocks(*source)), Side(LAYOUT, blocks(*target)), range(2 * BLOCK))


def test_a_block_partly_filled_is_copied_whole_where_layouts_are_alike() -> None:
    sides = Side(LAYOUT, blocks(3, 7)), Side(LAYOUT, blocks(1, 9))
    assert len(plan_copies(*sides, range(BLOCK + 1))) == 2
    assert plan_copies(*sides, range(BLOCK + 1)).num_bytes == 2 * SIZE


def test_unlike_blocks_are_copied_by_head_and_no_further_than_the_last_token() -> None:
    small, large = sample(16), sample(32)
    copies = plan_copies(Side(small, blocks(4, 9)), Side(large, blocks(2)), range(20))
    per_token = 30 * 2 * 3 * 64 * 2
    assert copies.num_bytes == 20 * per_token
    assert len(copies) == 2 * 30 * 2 * 3
    head_bytes = 64 * 2
    assert copies[0] == CopyOp(4 * small.block_bytes, 2 * large.block_bytes, 16 * head_bytes)
    assert copies[180] == CopyOp(
        9 * small.block_bytes, 2 * large.block_bytes + 16 * head_bytes, 4 * head_bytes
    )


def test_unlike_ranks_are_copied_by_layer_and_plane() -> None:
    """Three heads on two ranks: the second has the last one."""
    whole = sample(16)
    half = sample(16, num_kv_heads=1, total_kv_heads=3, tp_rank=1, tp_size=2)
    copies = plan_copies(Side(whole, blocks(5)), Side(half, blocks(6)), range(16))
    assert len(copies) == 30 * 2
    one_head = 16 * 64 * 2
    assert copies[0] == CopyOp(5 * whole.block_bytes + 2 * one_head, 6 * half.block_bytes, one_head)
    assert copies[1] == CopyOp(
        5 * whole.block_bytes + 5 * one_head, 6 * half.block_bytes + one_head, one_head
    )


def test_ranks_with_the_same_heads_take_whole_blocks_however_many_there_are() -> None:
    quarter = sample(16, num_kv_heads=1, total_kv_heads=2, tp_rank=3, tp_size=4)
    half = sample(16, num_kv_heads=1, total_kv_heads=2, tp_rank=1, tp_size=2)
    assert len(plan_copies(Side(half, blocks(1, 2)), Side(quarter, blocks(3, 4)), range(32))) == 1


def test_copies_of_a_head_take_turns() -> None:
    """Two heads on four ranks at the source, four at the target: each target rank asks its own."""

    def rank(index: int) -> KvLayout:
        return sample(16, num_kv_heads=1, total_kv_heads=2, tp_rank=index, tp_size=4)

    sent = [[bool(shared_heads(rank(s), rank(t))) for t in range(4)] for s in range(4)]
    assert sent == np.eye(4, dtype=bool).tolist()


def test_latents_are_one_vector_a_token_and_the_same_on_every_rank() -> None:
    latent = KvLayout("m", 3, 1, 576, 16, "bfloat16", kind="mla")
    assert latent.block_bytes == 3 * 16 * 576 * 2
    ranks = [replace(latent, total_kv_heads=1, tp_rank=r, tp_size=2) for r in range(2)]
    copies = [
        plan_copies(Side(latent, blocks(1)), Side(rank, blocks(2)), range(16)) for rank in ranks
    ]
    assert [tuple(each) for each in copies] == [
        (CopyOp(latent.block_bytes, 2 * latent.block_bytes, latent.block_bytes),)
    ] * 2


def test_a_window_leaves_out_blocks_that_it_has_passed() -> None:
    """Prompt of 64 tokens, position 64 next: a window of 17 begins at token 48."""
    layout = sample(16, num_layers=2, windows=(0, 17))
    assert first_needed(layout, 64).tolist() == [0, 48]
    sides = Side(layout, blocks(1, 2, 3, 4)), Side(layout, blocks(1, 2, 3, 4))
    copies = plan_copies(*sides, range(64), first_needed(layout, 64))
    assert copies.num_bytes == (4 + 1) * layout.layer_bytes
    longer = replace(layout, windows=(0, 18))
    assert first_needed(longer, 64).tolist() == [0, 47]
    needed = first_needed(longer, 64)
    assert plan_copies(*sides, range(64), needed).num_bytes == (4 + 2) * layout.layer_bytes


@pytest.mark.parametrize(
    ("num_heads", "num_ranks", "lengths"),
    [(3, 1, [3]), (3, 2, [2, 1]), (8, 4, [2, 2, 2, 2]), (1, 4, [1] * 4), (9, 4, [3, 2, 2, 2])],
)
def test_heads_are_dealt_evenly_the_longer_ranges_first(
    num_heads: int, num_ranks: int, lengths: list[int]
) -> None:
    assert [len(heads) for heads in head_ranges(num_heads, num_ranks)] == lengths


def test_copies_of_heads_are_on_neighbouring_ranks() -> None:
    assert head_ranges(2, 4) == (range(1), range(1), range(1, 2), range(1, 2))
    with pytest.raises(ValueError, match="3 KV heads cannot be dealt to 4 ranks"):
        head_ranges(3, 4)


def test_blocks_that_hold_tokens() -> None:
    assert blocks_of(range(31, 33), 16) == range(1, 3)
    assert blocks_of(range(32, 48), 16) == range(2, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "other"),
        ("num_layers", 3),
        ("num_kv_heads", 2),
        ("head_dim", 8),
        ("kind", "mla"),
        ("order", "NHD"),
        ("windows", (4, 0)),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name_with_both_values(
    field: str, value: object
) -> None:
    other = replace(LAYOUT, **{field: value})  # type: ignore[arg-type]
    name = "kv_heads" if field == "num_kv_heads" else field
    with pytest.raises(LayoutMismatchError, match=f"{name}: .* here, .* there"):
        check_plannable(LAYOUT, other)
    with pytest.raises(LayoutMismatchError, match=name):
        plan_copies(Side(LAYOUT, blocks(1)), Side(other, blocks(1)), range(4))


def test_heads_that_are_dealt_by_another_rule_are_refused() -> None:
    other = replace(LAYOUT, num_kv_heads=2, total_kv_heads=4, tp_size=4)
    ours = replace(LAYOUT, num_kv_heads=4)
    with pytest.raises(
        LayoutMismatchError, match="there: rank 0 of 4 holds 2 KV heads, expected 1"
    ):
        check_plannable(ours, other)


def test_a_copy_converts_nothing() -> None:
    other = replace(LAYOUT, dtype="bfloat16")
    with pytest.raises(LayoutMismatchError, match="KV in float32 here, in bfloat16 there"):
        plan_copies(Side(LAYOUT, blocks(1)), Side(other, blocks(1)), range(4))


def test_scales_lie_behind_the_vectors_of_their_layer_and_go_with_them() -> None:
    layout = sample(16, num_layers=2, num_kv_heads=2, dtype="int8")
    half = replace(layout, num_kv_heads=1, total_kv_heads=2, tp_rank=1, tp_size=2)
    vectors, scales = 16 * layout.head_dim, 16 * 4
    assert layout.layer_bytes == 4 * vectors + 4 * scales
    copies = plan_copies(Side(layout, blocks(1)), Side(half, blocks(0)), range(16))
    base = layout.block_bytes
    assert list(copies)[:4] == [
        CopyOp(base + vectors, 0, vectors),
        CopyOp(base + 3 * vectors, vectors, vectors),
        CopyOp(base + 4 * vectors + scales, 2 * vectors, scales),
        CopyOp(base + 4 * vectors + 3 * scales, 2 * vectors + scales, scales),
    ]
    whole = plan_copies(Side(layout, blocks(1)), Side(layout, blocks(2)), range(16))
    assert list(whole) == [CopyOp(base, 2 * base, base)]
