"""Whole KV blocks, and the heads of them that another tensor-parallel rank holds, moved about.

A block is L·2 planes; the heads wanted of one plane are one contiguous run. All three ops move such
runs between two places, either of which may name its blocks by a list of ids. Numbers are never
looked at: runs are moved as words of four bytes, or of fewer where four do not fit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from isthmus.kernels.triton.compilation import CompileCase

# 16 KiB: four vectors of 16 bytes for each thread of eight warps.
_TILE_WORDS = 4096


@triton.jit
def _move_kernel(
    source,
    target,
    source_ids,
    target_ids,
    source_block_stride,
    source_plane_stride,
    target_block_stride,
    target_plane_stride,
    num_planes,
    run_words,
    TILE: tl.constexpr,
):
    index = (tl.program_id(0) // num_planes).to(tl.int64)
    plane = tl.program_id(0) % num_planes
    source_block = index
    if source_ids is not None:
        source_block = tl.load(source_ids + index)
    target_block = index
    if target_ids is not None:
        target_block = tl.load(target_ids + index)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source += source_block * source_block_stride + plane * source_plane_stride
    target += target_block * target_block_stride + plane * target_plane_stride
    inside = words < run_words
    tl.store(target + words, tl.load(source + words, mask=inside), mask=inside)


def copy_blocks(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    assert source.shape == target.shape, (source.shape, target.shape)
    _move(kv, kv, source, target)


def gather_blocks(
    kv: torch.Tensor, block_ids: torch.Tensor, first_head: int, num_heads: int
) -> torch.Tensor:
    wanted = kv.narrow(3, first_head, num_heads)
    staged = torch.empty((len(block_ids), *wanted.shape[1:]), dtype=kv.dtype, device=kv.device)
    _move(wanted, staged, block_ids, None)
    return staged


def scatter_blocks(
    staged: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor, first_head: int
) -> None:
    assert staged.shape[0] == block_ids.shape[0], (staged.shape, block_ids.shape)
    _move(staged, kv.narrow(3, first_head, staged.shape[3]), None, block_ids)


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    """Both [blocks, L, 2, heads, …]; of a side with ids these choose the blocks, in their order."""
    assert source.shape[1:] == target.shape[1:], (source.shape, target.shape)
    assert source.dtype == target.dtype, (source.dtype, target.dtype)
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    assert ids.dtype == torch.int64
    assert source[:1, 0, 0].is_contiguous()
    assert target[:1, 0, 0].is_contiguous()
    if len(ids) == 0:
        return
    source, target = _as_words(source), _as_words(target)
    if source[0].is_contiguous() and target[0].is_contiguous():
        num_planes = 1
    else:  # planes at equal distances: a store whose layers carry scales is copied as bytes
        assert all(x.stride(1) == 2 * x.stride(2) for x in (source, target))
        num_planes = source.shape[1] * 2
    run_words = math.prod(source.shape[1:]) // num_planes
    tile = min(_TILE_WORDS, triton.next_power_of_2(run_words))
    _move_kernel[(len(ids) * num_planes, triton.cdiv(run_words, tile))](
        source,
        target,
        source_ids,
        target_ids,
        source.stride(0),
        source.stride(2),
        target.stride(0),
        target.stride(2),
        num_planes,
        run_words,
        TILE=tile,
        num_warps=max(1, min(8, tile // 512)),
    )


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    whole = blocks.shape[-1] * blocks.element_size() % 4 == 0
    return blocks.view(torch.int32 if whole else torch.uint8)


def _case(label: str, with_ids: tuple[str, ...]) -> CompileCase:
    ids = ("source_ids", "target_ids")
    strides = tuple(
        f"{side}_{unit}_stride" for side in ("source", "target") for unit in ("block", "plane")
    )
    return CompileCase(
        label=label,
        kernel=_move_kernel,
        types={
            **dict.fromkeys(("source", "target"), "*i32"),
            **dict.fromkeys(with_ids, "*i64"),
            **dict.fromkeys((*strides, "num_planes", "run_words"), "i32"),
        },
        constants={**dict.fromkeys(set(ids) - set(with_ids)), "TILE": _TILE_WORDS},
        aligned=frozenset((*strides, "run_words")),
        num_warps=8,
    )


COMPILE_CASES = (
    _case("copy", ("source_ids", "target_ids")),
    _case("gather", ("source_ids",)),
    _case("scatter", ("target_ids",)),
)
