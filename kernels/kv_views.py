"""The bytes of KV blocks as tensors: where ``isthmus.common.kv_layout`` says that things lie."""

from __future__ import annotations

import torch

from isthmus.common.kv_layout import KvLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def block_views(
    memory: torch.Tensor, layout: KvLayout, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """memory uint8 [≥ N · block_bytes] → vectors [N, L, P, G, B, D] and, where ``layout`` is
    quantised, their scales float32 [N, L, P, G, B]; both are views. P is 2, or 1 for latents."""
    layers = memory[: num_blocks * layout.block_bytes].view(
        num_blocks, layout.num_layers, layout.layer_bytes
    )
    shape = (*layers.shape[:2], layout.num_planes, layout.num_kv_heads, layout.block_size)
    num_vector_bytes = layout.num_planes * layout.layer_kv_bytes
    vectors = layers[..., :num_vector_bytes].view(TORCH_DTYPES[layout.dtype])
    scales = None
    if layout.is_quantised:
        scales = layers[..., num_vector_bytes:].view(torch.float32).view(shape)
    return vectors.view(*shape, layout.head_dim), scales
