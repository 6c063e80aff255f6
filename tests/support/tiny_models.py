"""Tiny random models of every family, made with transformers, and the same as GGUF files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import gguf
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}

FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "mistral-sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
}


def tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Float32, seeded; every parameter is random, so that none can be forgotten unnoticed."""
    model_class, config_class, own = FAMILIES[family]
    model = model_class(config_class(**{**SIZES, **own, **overrides}))
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1.0 if "norm" in name else noise)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, *, is_sharded: bool = False) -> Path:
    model.save_pretrained(folder, max_shard_size="40KB" if is_sharded else "1GB")
    return folder


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [T, V], the whole sequence at once."""
    logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.float()


def save_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    weight_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_divisors: list[float] | None = None,
    architecture: str | None = None,
) -> Path:
    """As llama.cpp's converter writes it: its names, and query and key rows of Llama permuted."""
    config = model.config
    family = architecture or config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _permuted(name, tensor, model).numpy()
        kind = weight_type if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), packed, raw_dtype=kind
        )
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(rope_divisors).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def _permuted(name: str, tensor: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    heads = {
        "q_proj": model.config.num_attention_heads,
        "k_proj": model.config.num_key_value_heads,
    }
    part = name.split(".")[-2]
    if model.config.model_type != "llama" or part not in heads:
        return tensor.contiguous()
    halves = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()
