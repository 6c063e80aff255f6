"""Every op in plain torch: the oracle of the other implementations and the fallback without them.

It runs on any device and favours clearness.
"""

from __future__ import annotations

import torch

from isthmus.kernels.reference.attention import paged_attention, rope_and_cache
from isthmus.kernels.reference.dense import (
    add_rms_norm,
    linear,
    pack_linear,
    rms_norm,
    silu_mul,
)

__all__ = [
    "add_rms_norm",
    "describe",
    "linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "silu_mul",
]


def describe() -> str:
    return f"reference (torch {torch.__version__})"
