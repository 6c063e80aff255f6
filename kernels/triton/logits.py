"""Adjusting logits in place: biases, penalties and what a grammar allows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isthmus.kernels.reference import sampling as reference
from isthmus.kernels.triton.compilation import CompileCase
from isthmus.kernels.types import Penalties

_BLOCK = 1024


@triton.jit
def _adjust_kernel(
    logits,  # [K, V] float32, changed in place
    output_counts,  # [R, V] int32, or None with all of the penalties
    is_in_prompt,  # [R, V] bytes
    table_rows,  # [K] int64
    repetition,  # [K]
    presence,  # [K]
    frequency,  # [K]
    bitmask,  # [K, num_words] int32, or None
    vocab_size,
    num_words,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    at = logits + row * vocab_size + ids
    values = tl.load(at, mask=inside, other=0.0)
    if output_counts is not None:
        repeated = tl.load(repetition + row)
        present = tl.load(presence + row)
        frequent = tl.load(frequency + row)
        if (repeated != 1.0) | (present != 0.0) | (frequent != 0.0):
            table = tl.load(table_rows + row) * vocab_size + ids
            counts = tl.load(output_counts + table, mask=inside, other=0)
            known = (counts > 0) | (tl.load(is_in_prompt + table, mask=inside, other=0) != 0)
            factor = tl.broadcast_to(repeated, values.shape)
            penalised = tl.where(values > 0, tl.math.div_rn(values, factor), values * factor)
            values = tl.where(known, penalised, values)
            values -= tl.where(counts > 0, present, 0.0)
            values -= counts.to(tl.float32) * frequent
    if bitmask is not None:
        words = tl.load(bitmask + row * num_words + ids // 32, mask=inside, other=0)
        values = tl.where(((words >> (ids % 32)) & 1) != 0, values, float("-inf"))
    tl.store(at, values, mask=inside)


def adjust_logits(
    logits: torch.Tensor,
    *,
    bias_ids: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    penalties: Penalties | None = None,
    bitmask: torch.Tensor | None = None,
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    if bias_ids is not None and biases is not None:
        reference.add_biases(logits, bias_ids, biases)
    if penalties is None and bitmask is None:
        return
    if bitmask is not None:
        assert bitmask.dtype == torch.int32
        assert bitmask.is_contiguous()
        assert bitmask.shape == (num_rows, triton.cdiv(vocab_size, 32)), bitmask.shape
    _adjust_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        *_penalty_arguments(penalties, vocab_size),
        *(bitmask, vocab_size, triton.cdiv(vocab_size, 32)),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # each step rounds, as it does with numpy
    )


def _penalty_arguments(
    penalties: Penalties | None, vocab_size: int
) -> tuple[torch.Tensor | None, ...]:
    if penalties is None:
        return (None,) * 6
    counts, is_in_prompt = penalties.output_counts, penalties.is_in_prompt
    assert counts.dtype == torch.int32
    assert counts.shape == is_in_prompt.shape == (counts.shape[0], vocab_size)
    assert counts.is_contiguous()
    assert is_in_prompt.is_contiguous()
    return (
        *(counts, is_in_prompt.view(torch.int8), penalties.table_rows),
        *(penalties.repetition, penalties.presence, penalties.frequency),
    )


def _case(label: str, has_penalties: bool, has_bitmask: bool) -> CompileCase:
    tables = {"output_counts": "*i32", "is_in_prompt": "*i8", "table_rows": "*i64"}
    penalties = tables | dict.fromkeys(("repetition", "presence", "frequency"), "*fp32")
    bitmask = {"bitmask": "*i32"}
    absent = ({} if has_penalties else penalties) | ({} if has_bitmask else bitmask)
    present = (penalties if has_penalties else {}) | (bitmask if has_bitmask else {})
    return CompileCase(
        label=label,
        kernel=_adjust_kernel,
        types={"logits": "*fp32", **present, **dict.fromkeys(("vocab_size", "num_words"), "i32")},
        constants={"BLOCK": _BLOCK, **dict.fromkeys(absent)},
        aligned=frozenset({"vocab_size"}),
        has_fp_fusion=False,
    )


COMPILE_CASES = (
    _case("adjust_logits-penalties", has_penalties=True, has_bitmask=False),
    _case("adjust_logits-bitmask", has_penalties=False, has_bitmask=True),
    _case("adjust_logits-all", has_penalties=True, has_bitmask=True),
)
