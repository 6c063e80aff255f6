"""Which architectures are supported, and what sets each family apart.

All are one decoder (``decoder``); a family is a function from its ``config.json`` to the
``DecoderConfig`` with its optional parts switched on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from isthmus.common.errors import UnknownArchitectureError
from isthmus.engine.models.config import DecoderConfig, RawConfig, decoder_config

MISTRAL_DEFAULT_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    """As in ``architectures`` of config.json."""
    gguf_name: str | None
    """As in ``general.architecture`` of a GGUF file; None = no such files (Mistral's say llama)."""
    models: str
    """For people: which published models these are."""
    configure: Callable[[RawConfig], DecoderConfig]


def configure(raw: RawConfig) -> DecoderConfig:
    """Raises UnknownArchitectureError, naming what is supported."""
    if raw.architecture not in ARCHITECTURES:
        raise unknown_architecture(raw.architecture or "(none given)")
    return ARCHITECTURES[raw.architecture].configure(raw)


def unknown_architecture(name: str) -> UnknownArchitectureError:
    supported = "; ".join(f"{item.name} ({item.models})" for item in ARCHITECTURES.values())
    message = f"architecture {name} is not supported; supported: {supported}"
    return UnknownArchitectureError(message, stage="load")


def _llama(raw: RawConfig) -> DecoderConfig:
    return replace(
        decoder_config(raw),
        has_qkv_bias=raw.attention_bias,
        has_output_bias=raw.attention_bias,
        has_ffn_bias=raw.mlp_bias,
    )


def _mistral(raw: RawConfig) -> DecoderConfig:
    window = raw.sliding_window
    if window is msgspec.UNSET:
        window = MISTRAL_DEFAULT_WINDOW
    return replace(decoder_config(raw), layer_windows=(window,) * raw.num_hidden_layers)


def _qwen2(raw: RawConfig) -> DecoderConfig:
    return replace(decoder_config(raw), has_qkv_bias=True, layer_windows=_qwen_windows(raw))


def _qwen3(raw: RawConfig) -> DecoderConfig:
    return replace(
        decoder_config(raw),
        head_dim=raw.head_dim or 128,
        has_qkv_bias=raw.attention_bias,
        has_output_bias=raw.attention_bias,
        has_qk_norm=True,
        layer_windows=_qwen_windows(raw),
    )


def _qwen_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """Qwen slides from layer ``max_window_layers`` on, or in the layers named ``layer_types``."""
    window = raw.sliding_window if isinstance(raw.sliding_window, int) else None
    if not raw.use_sliding_window or window is None:
        return (None,) * raw.num_hidden_layers
    kinds = raw.layer_types or [
        "sliding_attention" if layer >= raw.max_window_layers else "full_attention"
        for layer in range(raw.num_hidden_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


ARCHITECTURES = {
    item.name: item
    for item in (
        Architecture("LlamaForCausalLM", "llama", "Llama 2 and 3, SmolLM2", _llama),
        Architecture("MistralForCausalLM", None, "Mistral 7B", _mistral),
        Architecture("Qwen2ForCausalLM", "qwen2", "Qwen2, Qwen2.5", _qwen2),
        Architecture("Qwen3ForCausalLM", "qwen3", "Qwen3", _qwen3),
    )
}
