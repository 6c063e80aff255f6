"""The contract every implementation of the kernels keeps.

Dimension letters as in ``isthmus.engine.models.types``: T scheduled tokens, S sequences, M blocks
of the longest sequence, H query heads, G KV heads, D head size, E hidden size, F feed-forward size,
L layers, N KV blocks, B tokens per block, K rows that need logits; a linear maps ``in_features``
to ``out_features``.

An implementation is a module or an object with these functions. Activations are float32 on the CPU,
whatever the dtype of weights and KV; products accumulate in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights in the order one implementation reads them; opaque to everyone else.

    Only the implementation that packed it may read it: layouts differ.
    """

    in_features: int
    out_features: int
    data: torch.Tensor
    bias: torch.Tensor | None  # float32

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


class Kernels(Protocol):
    """The operations of one implementation; all return fresh tensors unless said otherwise."""

    def describe(self) -> str:
        """One line for an operator: implementation, instruction set, threads."""
        ...

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Takes weight [out_features, in_features] float32 or bfloat16, bias [out_features]."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, in_features] → [T, out_features]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, E] · weight [E] / rms(x) → [T, E]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (rms_norm(x + residual), x + residual), both [T, E]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2F], gate first → silu(gate) · up [T, F]."""
        ...

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        """Rotates q [T, H, D] and k [T, G, D] in place, then writes k, v [T, G, D] to their slots.

        q, k and v may be views of one [T, (H + 2G)·D] tensor: only rows may be strided.
        cos_sin [P, D] float32 holds D/2 cosines, then D/2 sines, of each position; element i is
        rotated with element i + D/2 (the NeoX convention). positions and slot_mapping int64 [T];
        slot −1 writes nothing. kv is [N, L, 2, G, B, D], of any block stride. With kv_scales
        float32 [N, L, 2, G, B] it is int8 or float8_e4m3fn: each vector is quantised as
        ``quantise_kv`` does and its scale is stored beside it.
        """
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        layer: int,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        scale: float,
        sliding_window: int | None = None,
        *,
        soft_cap: float | None = None,
        kv_scales: torch.Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of q [T, H, D] over the paged keys and values of one layer → [T, H·D].

        Query rows query_start[s] … query_start[s + 1] − 1 are the *last* tokens of sequence s,
        whose length with them is seq_lens[s]; a decode step is the case of one row.
        query_start int32 [S + 1], seq_lens int32 [S], block_table int32 [S, M]. The query at
        position p sees the keys j ≤ p, and with a window only those with p − j < sliding_window.
        Rows past query_start[S] become zero. With soft_cap c a score s (after scale) becomes
        c·tanh(s / c). kv_scales as in ``rope_and_cache``. max_query_len and max_seq_len are the
        largest chunk and length, where the host knows them: without them a device is waited for.
        """
        ...
