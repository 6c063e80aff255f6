"""Every op in plain torch: the oracle of the other implementations and the fallback without them.

It runs on any device and favours clearness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from isthmus.kernels.reference.attention import paged_attention, rope_and_cache
from isthmus.kernels.reference.dense import (
    add_rms_norm,
    linear,
    pack_linear,
    rms_norm,
    silu_mul,
)
from isthmus.kernels.reference.kv_blocks import copy_blocks, gather_blocks, scatter_blocks
from isthmus.kernels.reference.quant import dequantise_kv, quantise_kv
from isthmus.kernels.reference.sampling import adjust_logits, describe_tokens, draw_tokens

OPS: Mapping[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (
        pack_linear,
        linear,
        rms_norm,
        add_rms_norm,
        silu_mul,
        rope_and_cache,
        paged_attention,
        quantise_kv,
        dequantise_kv,
        copy_blocks,
        gather_blocks,
        scatter_blocks,
        adjust_logits,
        draw_tokens,
        describe_tokens,
    )
}

__all__ = [
    "OPS",
    "add_rms_norm",
    "adjust_logits",
    "copy_blocks",
    "dequantise_kv",
    "describe",
    "describe_tokens",
    "draw_tokens",
    "gather_blocks",
    "linear",
    "pack_linear",
    "paged_attention",
    "quantise_kv",
    "rms_norm",
    "rope_and_cache",
    "scatter_blocks",
    "silu_mul",
]


def describe() -> str:
    return f"reference (torch {torch.__version__})"
