"""The C interface of the compiled library, as ctypes sees it.

Pointers are plain addresses (``tensor.data_ptr()``): the caller keeps the tensors alive through the
call and has checked shapes and dtypes. ctypes releases the GIL while a function runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.kernels.cpu.build import BuildError

NO_WINDOW = 2**62


class RopeCall(ctypes.Structure):
    """Mirrors ``IsthmusRopeCall`` of elementwise.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "cos_sin", "positions", "slot_mapping")),
        ("kv", c_void_p),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("block_size", "block_stride")),
        ("is_bf16", c_int32),
    )


class AttentionCall(ctypes.Structure):
    """Mirrors ``IsthmusAttentionCall`` of attention.cpp, field by field."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "kv", "query_start", "seq_lens", "block_table")),
        ("out", c_void_p),
        *((name, c_int64) for name in ("q_stride", "num_sequences", "max_blocks")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("block_size", "block_stride", "window")),
        ("scale", c_float),
        ("is_bf16", c_int32),
        ("num_threads", c_int32),
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


def load_library(path: Path) -> Library:
    """Raises BuildError when the file is no library of this version for this machine."""
    try:
        handle = ctypes.CDLL(str(path))

        def bind(name: str, *argument_types: type[Any]) -> Callable[..., None]:
            function = handle[f"isthmus_{name}"]
            function.argtypes = argument_types
            function.restype = None
            return function

        return Library(
            path=path,
            linear=bind(
                *("linear", c_void_p, c_void_p, c_int, c_void_p, c_void_p),
                *(c_int64, c_int64, c_int64, c_int),
            ),
            rms_norm=bind("rms_norm", c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
            add_rms_norm=bind(
                *("add_rms_norm", c_void_p, c_void_p, c_void_p, c_float),
                *(c_int64, c_int64, c_void_p, c_void_p),
            ),
            silu_mul=bind("silu_mul", c_void_p, c_int64, c_int64, c_void_p),
            rope_and_cache=bind("rope_and_cache", ctypes.POINTER(RopeCall)),
            paged_attention=bind("paged_attention", ctypes.POINTER(AttentionCall)),
        )
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {path}: {error}") from error
