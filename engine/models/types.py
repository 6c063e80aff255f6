"""The seam between the engine and its models.

Dimension letters, everywhere: T scheduled tokens, S sequences, M blocks of the longest sequence,
H query heads, G KV heads, D head size, E hidden size, F feed-forward size, V vocabulary,
L layers, N KV blocks, B tokens per block, K rows that need logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from isthmus.common.layer_progress import LayerMarks


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input. All tensors on the model's device."""

    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T], block_id * B + offset; −1 = write nothing
    query_start: torch.Tensor  # int32 [S + 1], prefix sums of scheduled tokens
    seq_lens: torch.Tensor  # int32 [S], tokens to attend to including the scheduled ones
    block_table: torch.Tensor  # int32 [S, M], 0-padded
    logits_index: torch.Tensor  # int64 [K], rows of [T] whose logits are wanted
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the rest of the system needs to know of a loaded model."""

    name: str
    architecture: str
    fingerprint: str  # of configuration and weights
    num_layers: int
    num_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    sliding_window: int | None
    dtype: str  # of weights: float32 or bfloat16
    eos_token_ids: tuple[int, ...]
    weight_bytes: int  # of this rank
    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 0  # of all ranks, each counted once; 0 = num_kv_heads
    layer_windows: tuple[int, ...] = ()  # 0 = no window; () = no layer has one


class LanguageModel(Protocol):
    spec: ModelSpec

    def forward(
        self,
        batch: ForwardBatch,
        kv: torch.Tensor,
        marks: LayerMarks | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes K/V of the scheduled tokens into ``kv`` [N, L, 2, G, B, D] at ``slot_mapping``
        and returns logits float32 [K, V]. ``marks`` learns of each layer when all its K/V is
        written, before the next one begins. With ``kv_scales`` float32 [N, L, 2, G, B] the store is
        quantised."""
        ...
