"""Philox4x32-10, a counter-based random generator (Salmon et al., "Parallel Random Numbers: As Easy
as 1, 2, 3", SC 2011, §3.3).

A value depends on (key, counter) alone. With the request's seed as the key and the output token's
index as the counter, a draw is the same on every instance, in every batch and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_MASK_64 = (1 << 64) - 1


def philox4x32(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``counters`` [4, n] and ``keys`` [2, n] hold 32-bit words; so does the result [4, n]."""
    even, odd = counters[0::2], counters[1::2]  # words 0 and 2, words 1 and 3
    for _ in range(_ROUNDS):
        products = even * _MULTIPLIERS  # 32 × 32 bits fit in 64
        even = (products[::-1] >> _SHIFT_32) ^ odd ^ keys
        odd = products[::-1] & _LOW_32
        keys = (keys + _WEYL) & _LOW_32
    out = np.empty_like(counters)
    out[0::2], out[1::2] = even, odd
    return out


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """One draw from [0, 1) with 53 random bits for each (seed, index); float64 [n].

    A seed counts modulo 2⁶⁴."""
    seed = np.array([s & _MASK_64 for s in seeds], dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    counters = np.zeros((4, len(seed)), dtype=np.uint64)
    counters[0], counters[1] = index & _LOW_32, index >> _SHIFT_32
    words = philox4x32(counters, np.stack((seed & _LOW_32, seed >> _SHIFT_32)))
    high_bits = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    draws: NDArray[np.float64] = high_bits * np.float64(2.0**-53)
    return draws
