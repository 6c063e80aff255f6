"""Chooses the implementation of the kernels for a device.

``select`` returns a set of kernels for a caller that holds on to one; the functions of this module
are the same ops on the default set of their tensors' device, with one thread.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from isthmus.common.logging import get_logger
from isthmus.kernels import reference
from isthmus.kernels.cpu import BuildError, CpuKernels
from isthmus.kernels.types import Kernels, PackedLinear

Implementation = Literal["auto", "cpu", "reference"]

_log = get_logger("kernels")


@functools.cache
def select(
    device: str = "cpu", num_threads: int = 1, implementation: Implementation = "auto"
) -> Kernels:
    """The kernels for ``device`` (``cpu``, ``cuda``, ``cuda:1``); made once for equal arguments.

    ``auto`` takes the fastest that works here: on the CPU the compiled ones, or the reference where
    they cannot be compiled. Raises BuildError when they were asked for by name and cannot be.
    """
    on_cpu = device.partition(":")[0] == "cpu"
    if implementation == "cpu":
        return CpuKernels(num_threads)
    if implementation == "auto" and on_cpu:
        try:
            return CpuKernels(num_threads)
        except BuildError as error:
            _log.warning("no compiled CPU kernels; falling back to torch", reason=str(error))
    return reference


def describe(device: str = "cpu") -> str:
    return select(device).describe()


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    return _of(weight).pack_linear(weight, bias)


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    return _of(x).linear(x, packed)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _of(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _of(x).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _of(gate_up).silu_mul(gate_up)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    _of(q).rope_and_cache(q, k, v, cos_sin, positions, kv, layer, slot_mapping)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    return _of(q).paged_attention(
        q, kv, layer, query_start, seq_lens, block_table, scale, sliding_window
    )


def argmax(logits: torch.Tensor) -> torch.Tensor:
    return _of(logits).argmax(logits)


def _of(tensor: torch.Tensor) -> Kernels:
    return select(tensor.device.type)
