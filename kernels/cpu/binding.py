"""The C interface of the compiled library, as ctypes sees it.

Pointers are plain addresses (``tensor.data_ptr()``): the caller keeps the tensors alive through the
call and has checked shapes and dtypes. ctypes releases the GIL while a function runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from isthmus.common.native import bind_function
from isthmus.kernels.cpu.build import BuildError

NO_WINDOW = 2**62


class LinearParts(ctypes.Structure):
    """Mirrors the structure of linear.h, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "bias", "scales")),
        *(("depth", c_int64), ("width", c_int64), ("weight_type", c_int32)),
    )


class RopeParts(ctypes.Structure):
    """Mirrors the structure of elementwise.h, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("cos_sin", "positions", "slot_mapping")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size")),
        *(("block_stride", c_int64), ("scale_block_stride", c_int64), ("kv_type", c_int32)),
    )


class AttentionParts(ctypes.Structure):
    """Mirrors the structure of attention.h, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("query_start", "seq_lens", "block_table")),
        *((name, c_int64) for name in ("num_sequences", "max_blocks")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size")),
        *(("block_stride", c_int64), ("scale_block_stride", c_int64)),
        *(("scale", c_float), ("kv_type", c_int32)),
    )


class QuantiseParts(ctypes.Structure):
    """Mirrors the structure of quantise.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("source", "to", "scales")),
        *((name, c_int64 * 4) for name in ("counts", "from_strides")),
        *((name, c_int64 * 4) for name in ("to_strides", "scale_strides")),
        *(("dim", c_int64), ("from_type", c_int32)),
    )


class LayerParts(ctypes.Structure):
    """Mirrors the structure of step.cpp, field by field."""

    _fields_ = (
        *((name, LinearParts) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "ffn_norm", "query_norm", "key_norm")),
        ("window", c_int64),
    )


class DecoderParts(ctypes.Structure):
    """Mirrors the structure of step.cpp, field by field."""

    _fields_ = (
        *(("layers", POINTER(LayerParts)), ("num_layers", c_int64), ("final_norm", c_void_p)),
        *(("lm_head", LinearParts), ("eps", c_float), ("num_threads", c_int32)),
    )


class StepParts(ctypes.Structure):
    """Mirrors the structure of step.cpp, field by field."""

    _fields_ = (
        *(("attention", AttentionParts), ("rope", RopeParts)),
        *((name, c_void_p) for name in ("hidden", "logits_index", "kv", "kv_scales")),
        *((name, c_int64) for name in ("layer_bytes", "scale_layer_stride")),
        *((name, c_int64) for name in ("num_tokens", "num_logits")),
        *((name, c_void_p) for name in ("workspace", "logits", "num_final_layers")),
    )


@dataclass(frozen=True, slots=True)
class Library:
    path: Path
    linear: Callable[..., None]
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    rope_and_cache: Callable[..., None]
    paged_attention: Callable[..., None]
    quantise_kv: Callable[..., None]
    workspace_size: Callable[..., int]
    decoder_step: Callable[..., None]


def load_library(path: Path) -> Library:
    """Raises BuildError when the file is no library of this version for this machine."""
    try:
        bind = partial(bind_function, ctypes.CDLL(str(path)))
        return Library(
            path=path,
            linear=bind("linear", POINTER(LinearParts), c_void_p, c_int64, c_void_p, c_int),
            rms_norm=bind("rms_norm", c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
            add_rms_norm=bind(
                *("add_rms_norm", c_void_p, c_void_p, c_void_p, c_float),
                *(c_int64, c_int64, c_void_p, c_void_p),
            ),
            silu_mul=bind("silu_mul", c_void_p, c_int64, c_int64, c_void_p),
            rope_and_cache=bind(
                *("rope_and_cache", POINTER(RopeParts), c_void_p, c_int64, c_void_p, c_int64),
                *(c_void_p, c_int64, c_int64, c_void_p, c_void_p),
            ),
            paged_attention=bind(
                *("paged_attention", POINTER(AttentionParts), c_void_p, c_int64, c_void_p),
                *(c_void_p, c_int64, c_void_p, c_int),
            ),
            quantise_kv=bind("quantise_kv", POINTER(QuantiseParts)),
            workspace_size=bind("workspace_size", POINTER(DecoderParts), c_int64, result=c_int64),
            decoder_step=bind("decoder_step", POINTER(DecoderParts), POINTER(StepParts)),
        )
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {path}: {error}") from error
