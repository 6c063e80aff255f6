"""Products, norms and activations.

On the CPU weights are kept in float32: torch's bfloat16 product is several times slower there.
"""

from __future__ import annotations

import torch

from isthmus.kernels.reference.quant import quantise_weight
from isthmus.kernels.types import PackedLinear, Quantization


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: Quantization = "none"
) -> PackedLinear:
    out_features, in_features = weight.shape
    if quantization == "int8":  # the rounded weights, kept like any others
        quantised, scales = quantise_weight(weight)
        weight = quantised.float() * scales.unsqueeze(1)
    data = weight.float() if weight.device.type == "cpu" else weight
    return PackedLinear(in_features, out_features, data, None if bias is None else bias.float())


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    return torch.nn.functional.linear(x, packed.data.to(x.dtype), bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
