"""A checkpoint's own configuration, read once into what a decoder needs.

``RawConfig`` mirrors Hugging Face's ``config.json`` (GGUF metadata is brought into the same form by
``gguf``); ``DecoderConfig`` is what the rest of this package works with. The step between them is
the architecture's (``registry``): only it knows which optional parts a family has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from isthmus.common.errors import ConfigError, ModelFileError, UnknownArchitectureError
from isthmus.engine.models.rope import RopeConfig, RopeScaling, yarn_attention_factor

# Bounds that no real model meets: a damaged header must not make us allocate without end.
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
NumLayers = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class RawRope(msgspec.Struct, frozen=True, kw_only=True):
    """``rope_scaling`` (transformers 4) or ``rope_parameters`` (5: theta and scaling together)."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: float = 1.0
    factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_divisors: tuple[float, ...] = ()  # GGUF only


class RawConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of ``config.json`` that decoder-only models use; others are ignored."""

    architectures: list[str]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: NumLayers
    num_attention_heads: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_theta: Positive | None = None
    rope_scaling: RawRope | None = None
    rope_parameters: RawRope | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: float | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None

    @property
    def architecture(self) -> str:
        return self.architectures[0] if self.architectures else ""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        if self.eos_token_id is None:
            return ()
        ids = [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id
        return tuple(ids)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: pre-norm, rotary positions, grouped heads, gated feed-forward."""

    architecture: str
    vocab_size: Size
    hidden_size: Size
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_model_len: int
    layer_windows: tuple[int | None, ...]
    """Per layer: how many tokens, itself included, a token attends to; None = all before it."""
    has_tied_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Of the projection after attention."""
    has_ffn_bias: bool = False
    has_qk_norm: bool = False
    """RMS norm over each query and key head before the rotation."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def kv_windows(self) -> tuple[int, ...]:
        """``layer_windows`` as KV layouts have them: 0 for no window, () when no layer has one."""
        windows = tuple(window or 0 for window in self.layer_windows)
        return windows if any(windows) else ()

    @property
    def sliding_window(self) -> int | None:
        """The longest window, if *every* layer has one: KV before it is never read again."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None


def parse_config(data: Mapping[str, Any], source: str) -> RawConfig:
    """``source`` names the file in messages. Raises ModelFileError."""
    try:
        return msgspec.convert(data, RawConfig)
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{source}: {error}", stage="load") from error


def decoder_config(raw: RawConfig) -> DecoderConfig:
    """The part that all families share; ``registry`` adds each family's own.

    Raises UnknownArchitectureError for a variation that no supported model has.
    """
    if raw.hidden_act != "silu":
        raise _unsupported(f"hidden_act {raw.hidden_act!r}", "silu")
    if raw.partial_rotary_factor not in (None, 1.0):
        raise _unsupported(f"partial_rotary_factor {raw.partial_rotary_factor}", "1.0")
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method", "unknown")
        raise _unsupported(f"weights quantised by {method!r}", "float weights, GGUF files")
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        heads = f"{raw.num_attention_heads} query heads over {num_kv_heads} KV heads"
        raise _unsupported(heads, "a whole number of query heads to each KV head")
    head_dim = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    if head_dim % 2:
        raise _unsupported(f"head size {head_dim}", "even head sizes")
    return DecoderConfig(
        architecture=raw.architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        ffn_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=raw.rms_norm_eps,
        rope=_rope_config(raw),
        max_model_len=raw.max_position_embeddings,
        layer_windows=(None,) * raw.num_hidden_layers,
        has_tied_embeddings=raw.tie_word_embeddings,
        eos_token_ids=raw.eos_token_ids,
    )


def with_max_model_len(config: DecoderConfig, requested: int) -> DecoderConfig:
    """Sets the longest sequence; 0 = the model's own limit.

    Raises ConfigError when ``requested`` is beyond the positions the model can tell apart.
    """
    own = config.rope.own_limit(config.max_model_len)
    longest = config.rope.longest(config.max_model_len)
    if requested > longest:
        message = f"max_model_len {requested} is beyond the model's limit of {longest} tokens"
        raise ConfigError(message, stage="load", param="model.max_model_len")
    return replace(config, max_model_len=requested or own)


def _rope_config(raw: RawConfig) -> RopeConfig:
    rope = raw.rope_parameters or raw.rope_scaling or RawRope()
    kind = rope.rope_type or rope.type or RopeScaling.DEFAULT.value
    try:
        scaling = RopeScaling(kind)
    except ValueError:
        supported = ", ".join(item.value for item in RopeScaling)
        raise _unsupported(f"rope_type {kind!r}", supported) from None
    if rope.partial_rotary_factor != 1.0:
        raise _unsupported(f"partial_rotary_factor {rope.partial_rotary_factor}", "1.0")
    config = RopeConfig(
        theta=rope.rope_theta or raw.rope_theta or 10_000.0,
        scaling=scaling,
        original_max_len=raw.max_position_embeddings,
        frequency_divisors=rope.frequency_divisors,
    )
    if scaling is RopeScaling.DEFAULT:
        return config
    factor = _required(rope.factor, "factor", kind)
    config = replace(config, factor=factor)
    if scaling in {RopeScaling.LLAMA3, RopeScaling.YARN}:
        original = raw.original_max_position_embeddings or rope.original_max_position_embeddings
        config = replace(config, original_max_len=original or raw.max_position_embeddings)
    if scaling is RopeScaling.LLAMA3:
        return replace(
            config,
            low_freq_factor=_required(rope.low_freq_factor, "low_freq_factor", kind),
            high_freq_factor=_required(rope.high_freq_factor, "high_freq_factor", kind),
        )
    if scaling is RopeScaling.YARN:
        derived = yarn_attention_factor(factor, rope.mscale or 0.0, rope.mscale_all_dim or 0.0)
        return replace(
            config,
            beta_fast=rope.beta_fast or 32.0,
            beta_slow=rope.beta_slow or 1.0,
            is_truncated=rope.truncate,
            attention_factor=derived if rope.attention_factor is None else rope.attention_factor,
        )
    return config


def _required(value: float | None, name: str, kind: str) -> float:
    if value is None:
        raise ModelFileError(f"rope type {kind!r} lacks its {name!r}", stage="load")
    return value


def _unsupported(what: str, supported: str) -> UnknownArchitectureError:
    return UnknownArchitectureError(
        f"{what} is not supported; supported: {supported}", stage="load"
    )
