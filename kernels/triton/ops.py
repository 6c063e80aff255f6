"""What this package offers as an implementation of ``Kernels``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton

from isthmus.kernels.triton.activation import silu_mul
from isthmus.kernels.triton.kv_blocks import copy_blocks, gather_blocks, scatter_blocks
from isthmus.kernels.triton.logits import adjust_logits
from isthmus.kernels.triton.norm import add_rms_norm, rms_norm
from isthmus.kernels.triton.paged_attention import paged_attention
from isthmus.kernels.triton.quant import dequantise_kv, quantise_kv
from isthmus.kernels.triton.rope import rope_and_cache
from isthmus.kernels.triton.sampling import describe_tokens, draw_tokens

OPS: Mapping[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (
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


def describe() -> str:
    return f"triton ({triton.__version__})"


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which takes tensors of the CPU."""
    return bool(triton.knobs.runtime.interpret)
