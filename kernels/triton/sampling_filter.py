"""What top_k and top_p keep of a row's weights, found without sorting them.

By bisecting over the *bits* of a weight, since numbers that are not negative order as their bits
do::

    bits   0 ────────── lo ────────── hi ────────── of 1.0, the largest
           too few out  │  one number  │  all kept
                        └ equal weights: the first ``ties`` by id are kept

The ten or twenty looks that this takes are at the likely tokens alone, gathered once, unless what
is kept reaches beyond them. For use in the kernel of ``sampling``; sums are in ``UNITS``.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNITS = tl.constexpr(2.0**44)  # in the largest weight
_ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0 as float32
_LIKELY_BITS = tl.constexpr(0x38800000)  # of 2⁻¹⁴: few tokens weigh more, and little weighs less


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
        sums += tl.where(is_counted, (block_weights * UNITS).to(tl.int64), 0)
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
        sums += tl.where(is_likely, (block_weights * UNITS).to(tl.int64), 0)
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
            one = (lo.to(tl.float32, bitcast=True) * UNITS).to(tl.int64)
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
    units = tl.where(is_kept, (block_weights * UNITS).to(tl.int64), 0)
    return units, tl.sum(is_tie.to(tl.int64), axis=0)
