"""Drawing one token of each row without sorting it, and describing the token drawn.

``draw_tokens`` gives each row to one program: weights, what top_k and top_p keep of them
(``sampling_filter``), and the token at which the running sum passes the row's uniform number. Sums
of weights are integers, in ``UNITS``, so they are exact in any order and a row's token depends on
that row alone. A token of less weight than a unit is never drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isthmus.kernels.reference import sampling as reference
from isthmus.kernels.triton.compilation import CompileCase
from isthmus.kernels.triton.sampling_filter import UNITS, filter_row, kept_units
from isthmus.kernels.types import SamplingRows, TokenScores

_BLOCK = 4096
_NUM_WARPS = 8
_MOST_TOKENS = 2**19  # so many largest weights still fit into an int64 sum

_LEAST_TEMPERATURE = tl.constexpr(reference.LEAST_TEMPERATURE)
_MOST_TEMPERATURE = tl.constexpr(reference.MOST_TEMPERATURE)


@triton.jit
def find_peak(logits, vocab_size, BLOCK: tl.constexpr):
    """The largest of a row, the lowest id that has it, and whether the row has no NaN."""
    peak = float("-inf")
    best = 0
    num_nans = 0
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        num_nans += tl.sum((values != values).to(tl.int32), axis=0)  # noqa: PLR0124 - as NaN does
        values = tl.where(values == values, values, float("-inf"))  # noqa: PLR0124
        block_peak = tl.max(values, axis=0)
        block_best = tl.min(tl.where(values == block_peak, ids, vocab_size), axis=0)
        best = tl.where(block_peak > peak, block_best, best)
        peak = tl.maximum(block_peak, peak)
    return peak, best, num_nans == 0


@triton.jit
def weigh(logits, weights, vocab_size, peak, temperature, BLOCK: tl.constexpr):
    """Writes exp((logit − peak) / temperature) of each token; returns the sum, in units."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        values = tl.load(logits + ids, mask=inside, other=float("-inf"))
        scaled = tl.math.div_rn(values - peak, tl.broadcast_to(temperature, values.shape))
        block_weights = tl.exp(scaled)
        tl.store(weights + ids, block_weights, mask=inside)
        sums += (block_weights * UNITS).to(tl.int64)
    tl.debug_barrier()  # from now on any thread reads what another has written
    return tl.sum(sums, axis=0)


@triton.jit
def pick(weights, vocab_size, hi, lo, ties, min_p, uniform, BLOCK: tl.constexpr):
    """The id at which the running sum of kept units passes the uniform's share of all."""
    total = tl.zeros([], tl.int64)
    left = ties
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        units, num_ties = kept_units(weights, ids, vocab_size, hi, lo, left, min_p)
        total += tl.sum(units, axis=0)
        left -= num_ties
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    before = tl.zeros([], tl.int64)
    picked = tl.zeros([], tl.int32)
    left = ties
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        units, num_ties = kept_units(weights, ids, vocab_size, hi, lo, left, min_p)
        after = before + tl.sum(units, axis=0)
        if (before <= target) & (target < after):
            is_past = before + tl.cumsum(units, axis=0) > target
            picked = tl.min(tl.where(is_past, ids, vocab_size), axis=0)
        before = after
        left -= num_ties
    return picked


@triton.jit
def _draw_kernel(
    token_ids,  # [K] int64
    is_usable,  # [K] bytes
    weights,  # [K, 2, V] float32, to work in
    logits,  # [K, V] float32
    temperature,  # [K] float32
    top_k,  # [K] int32
    top_p,  # [K] float64
    min_p,  # [K] float32
    uniforms,  # [K] float64
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    weights += row * 2 * vocab_size
    peak, token_id, has_no_nan = find_peak(logits, vocab_size, BLOCK)
    usable = has_no_nan & (peak > float("-inf")) & (peak < float("inf"))
    heat = tl.load(temperature + row)
    if usable & (heat != 0.0):
        heat = tl.minimum(tl.maximum(heat, _LEAST_TEMPERATURE), _MOST_TEMPERATURE)
        total = weigh(logits, weights, vocab_size, peak, heat, BLOCK)
        hi, lo, ties = filter_row(
            weights, vocab_size, total, tl.load(top_k + row), tl.load(top_p + row), BLOCK
        )
        token_id = pick(
            weights, vocab_size, hi, lo, ties, tl.load(min_p + row), tl.load(uniforms + row), BLOCK
        )
    tl.store(token_ids + row, tl.where(usable, token_id, 0).to(tl.int64))
    tl.store(is_usable + row, usable.to(tl.int8))


@triton.jit
def _scores_kernel(
    log_totals,  # [K] float32, of the exponentials
    logprobs,  # [K] float32
    ranks,  # [K] int64
    logits,  # [K, V] float32
    token_ids,  # [K] int64
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    value = tl.load(logits + tl.load(token_ids + row))
    peak, _, _ = find_peak(logits, vocab_size, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        sums += tl.exp(values - peak)
        counts += (values > value).to(tl.int32)
    log_total = tl.log(tl.sum(sums, axis=0))  # relative to the peak: no digits are lost to it
    tl.store(log_totals + row, peak + log_total)
    tl.store(logprobs + row, value - peak - log_total)
    tl.store(ranks + row, tl.sum(counts, axis=0).to(tl.int64))


def draw_tokens(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    assert vocab_size < _MOST_TOKENS, vocab_size
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert rows.top_p.dtype == rows.uniforms.dtype == torch.float64
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_usable = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    _draw_kernel[(num_rows,)](
        *(token_ids, is_usable.view(torch.int8), logits.new_empty(num_rows, 2, vocab_size), logits),
        *(rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.uniforms, vocab_size),
        BLOCK=_block_size(vocab_size),
        num_warps=_NUM_WARPS,
    )
    return token_ids, is_usable


def describe_tokens(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenScores:
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    log_totals = logits.new_empty(num_rows)
    logprobs, ranks = torch.empty_like(log_totals), torch.empty_like(token_ids)
    _scores_kernel[(num_rows,)](
        *(log_totals, logprobs, ranks, logits, token_ids, vocab_size),
        BLOCK=_block_size(vocab_size),
        num_warps=_NUM_WARPS,
    )
    top_ids = reference.largest(logits, num_top)
    top_logprobs = logits.gather(1, top_ids) - log_totals.unsqueeze(1)
    return TokenScores(logprobs, ranks, top_ids, top_logprobs)


def _block_size(vocab_size: int) -> int:
    whole: int = triton.next_power_of_2(vocab_size)
    return min(_BLOCK, max(128, whole))


COMPILE_CASES = (
    CompileCase(
        label="draw_tokens",
        kernel=_draw_kernel,
        types={
            "token_ids": "*i64",
            "is_usable": "*i8",
            **dict.fromkeys(("weights", "logits", "temperature", "min_p"), "*fp32"),
            "top_k": "*i32",
            **dict.fromkeys(("top_p", "uniforms"), "*fp64"),
            "vocab_size": "i32",
        },
        constants={"BLOCK": _BLOCK},
        aligned=frozenset({"vocab_size"}),
        num_warps=_NUM_WARPS,
    ),
    CompileCase(
        label="describe_tokens",
        kernel=_scores_kernel,
        types={
            **dict.fromkeys(("log_totals", "logprobs", "logits"), "*fp32"),
            **dict.fromkeys(("ranks", "token_ids"), "*i64"),
            "vocab_size": "i32",
        },
        constants={"BLOCK": _BLOCK},
        aligned=frozenset({"vocab_size"}),
        num_warps=_NUM_WARPS,
    ),
)
