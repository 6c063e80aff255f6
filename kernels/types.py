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
from typing import Literal, Protocol

import torch

Quantization = Literal["none", "int8"]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights in the order one implementation reads them; opaque to everyone else.

    Only the implementation that packed it may read it: layouts differ.
    """

    in_features: int
    out_features: int
    data: torch.Tensor
    bias: torch.Tensor | None  # float32
    scales: torch.Tensor | None = None  # float32, one for each output; of int8 weights

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, slots=True)
class Penalties:
    """What each row of logits is made to avoid, by how often its sequence has each token.

    The counts stand in tables with a row of their own for each sequence, [R, V], so that they can
    stay on the device from step to step. A row that avoids nothing may name any row of the tables.
    """

    output_counts: torch.Tensor  # int32 [R, V], how often each token was put out
    is_in_prompt: torch.Tensor  # bool [R, V]
    table_rows: torch.Tensor  # int64 [K], the tables' row of each logits row
    repetition: torch.Tensor  # float32 [K], 1 = off
    presence: torch.Tensor  # float32 [K], 0 = off
    frequency: torch.Tensor  # float32 [K], 0 = off


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How the token of each of K rows is drawn; the fields mean what ``SamplingParams``' do."""

    temperature: torch.Tensor  # float32 [K], 0 = greedy
    top_k: torch.Tensor  # int32 [K], 0 = off
    top_p: torch.Tensor  # float64 [K], 1 = off
    min_p: torch.Tensor  # float32 [K], 0 = off
    uniforms: torch.Tensor  # float64 [K], each from [0, 1)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What ``describe_tokens`` finds; n alternatives, the likeliest first."""

    logprobs: torch.Tensor  # float32 [K]
    ranks: torch.Tensor  # int64 [K], 0 = most likely
    top_ids: torch.Tensor  # int64 [K, n]
    top_logprobs: torch.Tensor  # float32 [K, n]


class Kernels(Protocol):
    """The operations of one implementation; all return fresh tensors unless said otherwise."""

    def describe(self) -> str:
        """One line for an operator: implementation, instruction set, threads."""
        ...

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        quantization: Quantization = "none",
    ) -> PackedLinear:
        """Takes weight [out_features, in_features] float32 or bfloat16, bias [out_features].

        int8 keeps weights as ``reference.quant.quantise_weight`` rounds them.
        """
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

    def quantise_kv(
        self,
        x: torch.Tensor,
        dtype: torch.dtype,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., D] → ([..., D] of ``dtype``, scales float32 [...]); x ≈ quantised · scale.

        dtype is int8 or float8_e4m3fn. A scale brings its vector's largest element to the
        largest number of the dtype, and rounding is to nearest even; zeros get scale 0. ``out``
        is where to write both, views of any strides whose vectors are contiguous.
        """
        ...

    def dequantise_kv(
        self, quantised: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The inverse of ``quantise_kv``, as ``dtype``."""
        ...

    def copy_blocks(self, kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies block source[i] of kv to block target[i]; source and target int64 [n].

        Targets are distinct and none is a source. Here and below kv is a store
        [N, L, 2, G, B, D] or its scales [N, L, 2, G, B], of any block stride.
        """
        ...

    def gather_blocks(
        self, kv: torch.Tensor, block_ids: torch.Tensor, first_head: int, num_heads: int
    ) -> torch.Tensor:
        """Heads first_head … first_head + num_heads − 1 of blocks int64 [n], side by side.

        Returns [n, L, 2, num_heads, B, D], contiguous: what is sent to a rank of another
        tensor-parallel size.
        """
        ...

    def scatter_blocks(
        self, staged: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor, first_head: int
    ) -> None:
        """The inverse of ``gather_blocks``: writes staged [n, L, 2, G', B, D] to heads of kv.

        Head i of staged becomes head first_head + i of the block; block_ids are distinct.
        """
        ...

    def adjust_logits(
        self,
        logits: torch.Tensor,
        *,
        bias_ids: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
        penalties: Penalties | None = None,
        bitmask: torch.Tensor | None = None,
    ) -> None:
        """Changes logits float32 [K, V] in place: adds biases, then penalises, then masks.

        biases float32 [K, A] go to the tokens bias_ids int64 [K, A], distinct within a row; id −1
        is padding. A token that the sequence has is divided by its repetition penalty where its
        logit is positive, else multiplied (Keskar et al., "CTRL", 2019, §4.1); one that was put
        out loses the presence penalty, then its count times the frequency penalty. bitmask int32
        [K, ⌈V/32⌉]: bit i % 32 of word i // 32 is 0 for a token that must not come, which gets −∞.
        """
        ...

    def draw_tokens(
        self, logits: torch.Tensor, rows: SamplingRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row of logits float32 [K, V] → (ids int64 [K], is_usable bool [K]).

        Greedy takes the largest logit, the lowest id among equals. Else weights are
        exp((logit − largest) / temperature), and the kept tokens are those among the top_k
        likeliest, then among the fewest likeliest whose weight reaches top_p of the sum of those,
        then with a weight of at least min_p; the lower id is the likelier of equals. The token is
        the first, in order of ids, at which the running sum of kept weights passes the uniform's
        share of it. A row is not usable, and its id is 0, when it holds a NaN or its largest
        logit is not finite. A row's token depends on that row alone.
        """
        ...

    def describe_tokens(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> TokenScores:
        """Log-probability and rank of token_ids int64 [K] in logits float32 [K, V], and those of
        the num_top likeliest tokens of each row (all V at most); the lower id first of equals."""
        ...
