from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.kv_layout import DTYPE_BYTES, KvLayout, Plane, can_feed, fed_dtypes

LAYOUT = KvLayout("m", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
INT8 = replace(LAYOUT, dtype="int8")


def test_a_quantised_block_is_its_vectors_and_a_scale_for_each() -> None:
    assert INT8.block_bytes == 30 * 2 * 3 * 16 * (64 + 4)
    assert 1.8 < LAYOUT.block_bytes / INT8.block_bytes < 2
    assert replace(LAYOUT, dtype="fp8_e4m3").block_bytes == INT8.block_bytes


def test_planes_fill_a_layer_without_gap_or_overlap() -> None:
    assert INT8.planes == (Plane(0, 64), Plane(3072, 64), Plane(6144, 4), Plane(6336, 4))
    assert LAYOUT.planes == (Plane(0, 128), Plane(6144, 128))
    for dtype in DTYPE_BYTES:
        for layout in (replace(LAYOUT, dtype=dtype), replace(LAYOUT, dtype=dtype, kind="mla")):
            end = 0
            for plane in layout.planes:
                assert plane.offset == end
                end += layout.num_kv_heads * layout.block_size * plane.vector_bytes
            assert end == layout.layer_bytes


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("float32", {"float32", "bfloat16", "int8", "fp8_e4m3"}),
        ("bfloat16", {"bfloat16", "int8", "fp8_e4m3"}),
        ("int8", {"int8"}),
        ("fp8_e4m3", {"fp8_e4m3"}),
    ],
)
def test_kv_is_converted_to_fewer_bytes_only(source: str, targets: set[str]) -> None:
    assert set(fed_dtypes(source)) == targets
    assert {dtype for dtype in DTYPE_BYTES if can_feed(source, dtype)} == targets


def test_a_conversion_that_is_not_there_is_told_with_its_reason() -> None:
    assert LAYOUT.cannot_feed(INT8) == ""
    assert LAYOUT.compat_hash == INT8.compat_hash
    assert INT8.cannot_feed(LAYOUT) == (
        "dtype: KV in int8 cannot be sent to a store in bfloat16 (it would have to be restored)"
    )
    wide = replace(LAYOUT, dtype="float32")
    assert LAYOUT.cannot_feed(wide).endswith("KV in bfloat16 cannot be sent to a store in float32")


def test_tokens_that_a_layer_no_longer_looks_at_are_not_moved() -> None:
    """Position 100 comes next: a window of 40 begins at token 61, within the fourth block."""
    layout = replace(LAYOUT, num_layers=3, windows=(0, 40, 70))
    assert layout.first_needed(100) == (0, 61, 31)
    assert layout.unmoved_tokens(100) == 48
    assert replace(layout, windows=()).unmoved_tokens(100) == 0
    assert layout.unmoved_tokens(39) == 0
