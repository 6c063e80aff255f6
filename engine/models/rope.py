"""Rotary position embedding: one table of cosines and sines per model.

A row is a position: ``[cos(p·f_0) … cos(p·f_{D/2−1}), sin(p·f_0) … sin(p·f_{D/2−1})]``, both halves
times the attention factor. Frequencies depend on the model and its longest sequence alone, never on
the sequence at hand: KV blocks are shared between sequences and instances, so a key must have one
rotation for ever. For that reason dynamic scaling is fixed at the configured ``max_model_len``.

Sources: RoFormer (arXiv 2104.09864) §3.2; position interpolation (2306.15595); dynamic NTK scaling
as in transformers; YaRN (2309.00071) §3; Llama 3.1's scaling as in its reference code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch


class RopeScaling(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float = 10_000.0
    scaling: RopeScaling = RopeScaling.DEFAULT
    factor: float = 1.0
    """By how much the context is stretched."""
    original_max_len: int = 0
    """The context the model was trained with before stretching."""
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    is_truncated: bool = True  # yarn: whole dimensions as bounds of the ramp
    attention_factor: float = 1.0  # yarn: on cosines and sines
    frequency_divisors: tuple[float, ...] = ()
    """Per frequency, as GGUF files carry the llama3 scaling; empty = none."""

    @property
    def depends_on_max_model_len(self) -> bool:
        return self.scaling is RopeScaling.DYNAMIC

    def own_limit(self, max_position: int) -> int:
        """Longest sequence that the model is meant for."""
        if self.scaling is RopeScaling.YARN:
            return max(max_position, int(self.original_max_len * self.factor))
        return max_position

    def longest(self, max_position: int) -> int:
        """Longest sequence that may be configured."""
        if self.depends_on_max_model_len:
            return int(max_position * self.factor)
        return self.own_limit(max_position)


def cos_sin_table(rope: RopeConfig, head_dim: int, max_model_len: int) -> torch.Tensor:
    """float32 ``[P, D]`` for positions below ``max_model_len``."""
    frequencies = inverse_frequencies(rope, head_dim, max_model_len)
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # [P, D / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> torch.Tensor:
    """float32 ``[D / 2]``, radians per position."""
    match rope.scaling:
        case RopeScaling.LINEAR:
            frequencies = _plain(rope.theta, head_dim) / rope.factor
        case RopeScaling.DYNAMIC:
            frequencies = _plain(_dynamic_theta(rope, head_dim, max_model_len), head_dim)
        case RopeScaling.LLAMA3:
            frequencies = _llama3(rope, _plain(rope.theta, head_dim))
        case RopeScaling.YARN:
            frequencies = _yarn(rope, head_dim)
        case RopeScaling.DEFAULT:
            frequencies = _plain(rope.theta, head_dim)
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    return frequencies


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """The temperature of YaRN §3.4; with two scales given (DeepSeek's way), their quotient."""

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.as_tensor(1.0 / theta**exponents)


def _dynamic_theta(rope: RopeConfig, head_dim: int, max_model_len: int) -> float:
    """Theta for sequences of up to ``max_model_len``; the plain one inside the trained context."""
    stretch = max(max_model_len, rope.original_max_len) / rope.original_max_len
    ntk = rope.factor * stretch - (rope.factor - 1)
    return float(rope.theta * ntk ** (head_dim / (head_dim - 2)))


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between are blended."""
    rotations = rope.original_max_len * frequencies / (2 * math.pi)  # over the trained context
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((rotations - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / rope.factor)


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn seldom stretched, a ramp between."""
    frequencies = _plain(rope.theta, head_dim)

    def dimension(num_rotations: float) -> float:
        period = rope.original_max_len / (num_rotations * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high if high != low else low + 0.001  # a step instead of a ramp
    dims = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((dims - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * ((1.0 - stretched) + stretched / rope.factor)
