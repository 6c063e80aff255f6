from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.errors import LayoutMismatchError
from isthmus.kvtransfer.interface import CopyOp
from isthmus.kvtransfer.plan import check_plannable, plan_copies
from tests.support.transfer_pair import LAYOUT, blocks

SIZE = LAYOUT.block_bytes


def test_neighbours_on_both_sides_become_one_copy() -> None:
    ops = plan_copies(LAYOUT, LAYOUT, blocks(7, 8, 9, 3), blocks(0, 1, 2, 5))
    assert ops == (
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
    assert len(plan_copies(LAYOUT, LAYOUT, blocks(*source), blocks(*target))) == 2


def test_no_blocks_no_copies() -> None:
    assert plan_copies(LAYOUT, LAYOUT, [], []) == ()


def test_lists_of_unlike_length_are_a_bug() -> None:
    with pytest.raises(ValueError):
        plan_copies(LAYOUT, LAYOUT, blocks(1, 2), blocks(1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "other"),
        ("num_layers", 3),
        ("num_kv_heads", 2),
        ("head_dim", 8),
        ("block_size", 8),
        ("dtype", "bfloat16"),
        ("kind", "mla"),
        ("order", "NHD"),
        ("tp_size", 2),
        ("tp_rank", 1),
    ],
)
def test_every_differing_field_is_refused_by_name(field: str, value: object) -> None:
    other = replace(LAYOUT, **{field: value})  # type: ignore[arg-type]
    name = "kv_heads" if field == "num_kv_heads" else field
    with pytest.raises(LayoutMismatchError, match=name):
        check_plannable(LAYOUT, other)
    with pytest.raises(LayoutMismatchError, match=name):
        plan_copies(LAYOUT, other, blocks(1), blocks(1))


def test_both_dtypes_are_named() -> None:
    with pytest.raises(LayoutMismatchError, match="dtype: float32 here, bfloat16 there"):
        check_plannable(LAYOUT, replace(LAYOUT, dtype="bfloat16"))
