"""A whole decoder as the kernels see it, for implementations that run all its ops at once.

What such an implementation gives is what the ops give one by one, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from isthmus.common.layer_progress import LayerMarks
from isthmus.kernels.cpu import CpuKernels
from isthmus.kernels.types import Kernels, PackedLinear

_FUSED_OPS = (
    *("linear", "rms_norm", "add_rms_norm", "silu_mul"),
    *("rope_and_cache", "paged_attention"),
)


class DecoderLayer(Protocol):
    @property
    def attention_norm(self) -> torch.Tensor: ...  # [E]
    @property
    def qkv(self) -> PackedLinear: ...  # E → (H + 2G)·D
    @property
    def query_norm(self) -> torch.Tensor | None: ...  # [D]
    @property
    def key_norm(self) -> torch.Tensor | None: ...  # [D]
    @property
    def output(self) -> PackedLinear: ...  # H·D → E
    @property
    def ffn_norm(self) -> torch.Tensor: ...  # [E]
    @property
    def gate_up(self) -> PackedLinear: ...  # E → 2F
    @property
    def down(self) -> PackedLinear: ...  # F → E


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    layers: Sequence[DecoderLayer]
    windows: Sequence[int | None]
    final_norm: torch.Tensor  # [E]
    lm_head: PackedLinear  # E → V
    cos_sin: torch.Tensor  # [P, D] float32
    num_heads: int
    scale: float
    norm_eps: float


class StepTensors(Protocol):
    """One step's input, as the ops take it."""

    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def slot_mapping(self) -> torch.Tensor: ...
    @property
    def query_start(self) -> torch.Tensor: ...
    @property
    def seq_lens(self) -> torch.Tensor: ...
    @property
    def block_table(self) -> torch.Tensor: ...
    @property
    def logits_index(self) -> torch.Tensor: ...  # int64 [K], ascending


class FusedDecoder(Protocol):
    def __call__(
        self,
        hidden: torch.Tensor,
        step: StepTensors,
        kv: torch.Tensor,
        marks: LayerMarks | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [T, E], the embedded tokens, which it may overwrite → logits float32 [K, V].

        ``marks`` learns of each layer when all its KV is written."""
        ...


def fuse(kernels: Kernels, decoder: DecoderTensors) -> FusedDecoder | None:
    """None unless all ops of a forward pass come from one implementation that can fuse them."""
    owners = [getattr(getattr(kernels, op), "__self__", None) for op in _FUSED_OPS]
    owner = owners[0]
    if isinstance(owner, CpuKernels) and all(other is owner for other in owners):
        return owner.fuse(decoder)
    return None
