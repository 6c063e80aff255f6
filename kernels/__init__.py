"""The operations of a forward pass, each a pure function with one signature for all devices."""

from isthmus.kernels.registry import (
    add_rms_norm,
    argmax,
    describe,
    linear,
    pack_linear,
    paged_attention,
    rms_norm,
    rope_and_cache,
    select,
    silu_mul,
)
from isthmus.kernels.types import Kernels, PackedLinear

__all__ = [
    "Kernels",
    "PackedLinear",
    "add_rms_norm",
    "argmax",
    "describe",
    "linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "select",
    "silu_mul",
]
