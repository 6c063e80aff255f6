"""The least time a figure can take on this machine, from a model's shape and measured limits.

A step takes at least the time to read what it must read, and at least the time of its products:
the roofline model of Williams, Waterman and Patterson (2009). Reading counts the weights once a
step and the keys and values of every sequence; products count two operations a weight and row, and
the scores and sums of causal attention. Activations, norms and sampling count nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.limit import Limits

KV_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder of the Llama family, as its ``config.json`` names them."""

    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_params(self) -> int:
        """Weights of the matrices of all layers."""
        attention = self.hidden * (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * KV_BYTES_PER_ELEMENT

    def attention_flops(self, num_pairs: float) -> float:
        """Of ``num_pairs`` pairs of a query and a key that it sees: a product and a sum each."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * num_pairs


def read_shape(model: Path) -> ModelShape:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    num_heads = config["num_attention_heads"]
    return ModelShape(
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads", num_heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        vocab=config["vocab_size"],
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds for one format of the weights; FLOPs at the best matrix rate for bf16 weights."""

    shape: ModelShape
    limits: Limits
    bytes_per_weight: float

    def prefill_s(self, num_tokens: int) -> float:
        """A prompt by itself; logits are needed for its last token only."""
        shape = self.shape
        flops = 2.0 * (shape.layer_params * num_tokens + shape.head_params)
        flops += shape.attention_flops(num_tokens * (num_tokens + 1) / 2)
        return max(flops / self.limits.flops_per_s, self.weights_s())

    def weights_s(self) -> float:
        num_bytes = (self.shape.layer_params + self.shape.head_params) * self.bytes_per_weight
        return num_bytes / self.limits.read_bytes_per_s

    def decode_step_s(self, batch: int, context: int) -> float:
        """One token for each of ``batch`` sequences of ``context`` tokens."""
        shape = self.shape
        kv_s = batch * context * shape.kv_bytes_per_token / self.limits.read_bytes_per_s
        flops = 2.0 * batch * (shape.layer_params + shape.head_params)
        flops += shape.attention_flops(batch * context)
        return max(self.weights_s() + kv_s, flops / self.limits.flops_per_s)

    def tokens_per_s(self, batch: int, prompt_tokens: int, output_tokens: int) -> float:
        """``batch`` requests that come at once: their prompts, then steps until all have ended."""
        steps = output_tokens - 1
        decode_s = steps * self.decode_step_s(batch, prompt_tokens + output_tokens // 2)
        return batch * output_tokens / (batch * self.prefill_s(prompt_tokens) + decode_s)
