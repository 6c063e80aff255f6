"""Adjusting logits, and drawing one token of each row without sorting it.

``draw_tokens`` gives each row to one program. What top_k and top_p keep is found by bisecting over
the *bits* of a weight, since numbers that are not negative order as their bits do::

    bits   0 ────────── lo ────────── hi ────────── of 1.0, the largest
           too few out  │  one number  │  all kept
                        └ equal weights: the first ``ties`` by id are kept

The ten or twenty looks that this takes are at the likely tokens alone, gathered once, unless
what is kept reaches beyond them. Sums of weights are integers, in units of 2⁻⁴⁴ of the largest, so
they are exact in any order and a row's token depends on that row alone. A token of less weight than
that is never drawn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isthmus.kernels.reference import sampling as reference
from isthmus.kernels.triton.compilation import CompileCase
from isthmus.kernels.types import Penalties, SamplingRows, TokenScores

_BLOCK = 4096
_NUM_WARPS = 8
_ADJUST_BLOCK = 1024
_MOST_TOKENS = 2**19  # so many largest weights still fit into an int64 sum

_UNITS = tl.constexpr(2.0**44)
_ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0 as float32
_LIKELY_BITS = tl.constexpr(0x38800000)  # of 2⁻¹⁴: few tokens weigh more, and little weighs less
_LEAST_TEMPERATURE = tl.constexpr(reference.LEAST_TEMPERATURE)
_MOST_TEMPERATURE = tl.constexpr(reference.MOST_TEMPERATURE)


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
        sums += (block_weights * _UNITS).to(tl.int64)
    tl.debug_barrier()  # from now on any thread reads what another has written
    return tl.sum(sums, axis=0)


@triton.jit
def measure(weights, num_weights, least, BLOCK: tl.constexpr):
    """How many weights are at least ``least``, and their sum; both int64."""
    counts = tl.zeros([BLOCK], tl.int64)
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_weights, BLOCK):
        at = start + tl.arange(0, BLOCK)
        block_weights = tl.load(weights + at, mask=at < num_weights, other=-1.0)
        is_counted = block_weights >= least
        counts += is_counted.to(tl.int64)
        sums += tl.where(is_counted, (block_weights * _UNITS).to(tl.int64), 0)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit
def gather_likely(weights, likely, vocab_size, BLOCK: tl.constexpr):
    """Writes the likely tokens' weights, side by side; returns their number and their sum."""
    num_likely = tl.zeros([], tl.int32)
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        block_weights = tl.load(weights + ids, mask=ids < vocab_size, other=-1.0)
        is_likely = block_weights.to(tl.int32, bitcast=True) >= _LIKELY_BITS
        places = num_likely + tl.cumsum(is_likely.to(tl.int32), axis=0) - 1
        tl.store(likely + places, block_weights, mask=is_likely)
        sums += tl.where(is_likely, (block_weights * _UNITS).to(tl.int64), 0)
        num_likely += tl.sum(is_likely.to(tl.int32), axis=0)
    tl.debug_barrier()
    return num_likely, tl.sum(sums, axis=0)


@triton.jit
def bisect_top_k(weights, num_weights, lo, top_k, BLOCK: tl.constexpr):
    """(hi, lo, ties): kept are the weights of bits ≥ hi, and the first ties of those ≥ lo.

    There are num_weights ≥ top_k to choose from, none below the bits lo.
    """
    hi = tl.zeros([], tl.int32) + (_ONE_BITS + 1)
    count_lo = tl.zeros([], tl.int64) + num_weights
    count_hi = tl.zeros([], tl.int64)
    while (hi - lo > 1) & (count_lo != top_k):  # count_lo ≥ top_k > count_hi
        middle = lo + (hi - lo) // 2
        count, _ = measure(weights, num_weights, middle.to(tl.float32, bitcast=True), BLOCK)
        is_enough = count >= top_k
        lo = tl.where(is_enough, middle, lo)
        count_lo = tl.where(is_enough, count, count_lo)
        hi = tl.where(is_enough, hi, middle)
        count_hi = tl.where(is_enough, count_hi, count)
    return hi, lo, top_k - count_hi


@triton.jit
def bisect_top_p(weights, num_weights, needed, lo, count_lo, sum_lo, BLOCK: tl.constexpr):
    """As above for the fewest likeliest whose sum reaches ``needed`` units, at least one.

    From lo on there are count_lo tokens to choose from, which weigh sum_lo ≥ needed.
    """
    hi = tl.zeros([], tl.int32) + (_ONE_BITS + 1)
    count_hi = tl.zeros([], tl.int64)
    sum_hi = tl.zeros([], tl.int64)
    while (hi - lo > 1) & (count_lo - count_hi > 1):  # sum_lo ≥ needed > sum_hi
        middle = lo + (hi - lo) // 2
        count, mass = measure(weights, num_weights, middle.to(tl.float32, bitcast=True), BLOCK)
        is_enough = mass >= needed
        lo = tl.where(is_enough, middle, lo)
        count_lo = tl.where(is_enough, count, count_lo)
        sum_lo = tl.where(is_enough, mass, sum_lo)
        hi = tl.where(is_enough, hi, middle)
        count_hi = tl.where(is_enough, count_hi, count)
        sum_hi = tl.where(is_enough, sum_hi, mass)
    each = (sum_lo - sum_hi) // (count_lo - count_hi)
    return hi, lo, (needed - sum_hi + each - 1) // each


@triton.jit
def filter_row(weights, vocab_size, total, top_k, top_p, BLOCK: tl.constexpr):
    """(hi, lo, ties), as above, of what top_k and then top_p keep of weights that sum to total."""
    hi = tl.zeros([], tl.int32)
    lo = tl.zeros([], tl.int32)
    ties = tl.zeros([], tl.int64)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if has_top_k | (top_p < 1.0):
        likely = weights + vocab_size
        num_likely, sum_likely = gather_likely(weights, likely, vocab_size, BLOCK)
        # Where to look, and what is kept so far: count and sum of the weights from lo on.
        source = weights
        size = tl.zeros([], tl.int32) + vocab_size
        count = tl.zeros([], tl.int64) + vocab_size
        kept = total
        if has_top_k:
            if num_likely >= top_k:
                source = likely
                size = num_likely
                lo += _LIKELY_BITS
            hi, lo, ties = bisect_top_k(source, size, lo, top_k.to(tl.int64), BLOCK)
            count = top_k.to(tl.int64)
            _, above = measure(source, size, hi.to(tl.float32, bitcast=True), BLOCK)
            _, all_from = measure(source, size, lo.to(tl.float32, bitcast=True), BLOCK)
            # Either the ties are equal, or all of them are kept.
            one = (lo.to(tl.float32, bitcast=True) * _UNITS).to(tl.int64)
            kept = tl.where(hi - lo > 1, all_from, above + ties * one)
        if top_p < 1.0:
            needed = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64)
            needed = tl.minimum(tl.maximum(needed, 1), kept)
            if (lo < _LIKELY_BITS) & (sum_likely >= needed):  # then no other token is needed
                source = likely
                size = num_likely
                lo = tl.zeros([], tl.int32) + _LIKELY_BITS
                count = num_likely.to(tl.int64)
                kept = sum_likely
            hi, lo, ties = bisect_top_p(source, size, needed, lo, count, kept, BLOCK)
    return hi, lo, ties


@triton.jit
def kept_units(weights, ids, vocab_size, hi, lo, ties, min_p):
    """Units of one block's kept tokens, and how many of its equals ``ties`` were spent on."""
    block_weights = tl.load(weights + ids, mask=ids < vocab_size, other=-1.0)
    is_above = block_weights >= hi.to(tl.float32, bitcast=True)
    is_tie = (block_weights >= lo.to(tl.float32, bitcast=True)) & (is_above == 0)
    places = tl.cumsum(is_tie.to(tl.int32), axis=0)
    is_kept = (is_above | (is_tie & (places <= ties))) & (block_weights >= min_p)
    units = tl.where(is_kept, (block_weights * _UNITS).to(tl.int64), 0)
    return units, tl.sum(is_tie.to(tl.int64), axis=0)


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
    _adjust_kernel[(num_rows, triton.cdiv(vocab_size, _ADJUST_BLOCK))](
        logits,
        *_penalty_arguments(penalties, vocab_size),
        *(bitmask, vocab_size, triton.cdiv(vocab_size, 32)),
        BLOCK=_ADJUST_BLOCK,
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


def _adjust_case(label: str, has_penalties: bool, has_bitmask: bool) -> CompileCase:
    tables = {"output_counts": "*i32", "is_in_prompt": "*i8", "table_rows": "*i64"}
    penalties = tables | dict.fromkeys(("repetition", "presence", "frequency"), "*fp32")
    bitmask = {"bitmask": "*i32"}
    absent = ({} if has_penalties else penalties) | ({} if has_bitmask else bitmask)
    present = (penalties if has_penalties else {}) | (bitmask if has_bitmask else {})
    return CompileCase(
        label=label,
        kernel=_adjust_kernel,
        types={"logits": "*fp32", **present, **dict.fromkeys(("vocab_size", "num_words"), "i32")},
        constants={"BLOCK": _ADJUST_BLOCK, **dict.fromkeys(absent)},
        aligned=frozenset({"vocab_size"}),
        has_fp_fusion=False,
    )


COMPILE_CASES = (
    _adjust_case("adjust_logits-penalties", has_penalties=True, has_bitmask=False),
    _adjust_case("adjust_logits-bitmask", has_penalties=False, has_bitmask=True),
    _adjust_case("adjust_logits-all", has_penalties=True, has_bitmask=True),
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
