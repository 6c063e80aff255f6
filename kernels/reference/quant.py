"""KV in one byte an element: a scale for each vector of one head and token; weights likewise.

A vector's scale depends on nothing else, so a block that fills up token by token is never
quantised again, and a block carries its own scales wherever it is sent.
"""

from __future__ import annotations

import torch

# The largest magnitude that each dtype holds: it is what a vector's largest element becomes.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] → (int8 [N, K], scales float32 [N]): ``quantise_kv``'s rule for each output."""
    return quantise_kv(weight, torch.int8)


def quantise_kv(
    x: torch.Tensor,
    dtype: torch.dtype,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] → (quantised [..., D] of ``dtype``, scales float32 [...]); x ≈ quantised · scale.

    int8 rounds to nearest even. A vector of zeros gets scale 0. ``out`` is where to write both.
    """
    wide = x.float()
    scales = wide.abs().amax(dim=-1) / LARGEST[dtype]
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    scaled = wide / safe.unsqueeze(-1)
    if dtype is torch.int8:
        scaled = scaled.round().clamp(-LARGEST[dtype], LARGEST[dtype])
    if out is None:
        return scaled.to(dtype), scales
    out[0].copy_(scaled)
    out[1].copy_(scales)
    return out


def dequantise_kv(
    quantised: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The inverse of ``quantise_kv``, as ``dtype``."""
    return (quantised.float() * scales.unsqueeze(-1)).to(dtype)
