"""Decoders of the shape of Llama models with random weights, made on the device: no download."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isthmus.engine.models.config import DecoderConfig
from isthmus.engine.models.decoder import Decoder
from isthmus.engine.models.parallel import Parallel
from isthmus.engine.models.rope import RopeConfig, cos_sin_table
from isthmus.engine.models.shard import Split, shard_of
from isthmus.engine.models.types import ModelSpec
from isthmus.engine.models.weights import DecoderWeights, LayerWeights
from isthmus.engine.tp_group import SingleRank
from isthmus.kernels import Kernels


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions as published in the models' configurations."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_tied_embeddings: bool

    @property
    def linear_weights(self) -> int:
        """Numbers that every token is multiplied with, the output layer apart."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = (heads + self.num_heads) * self.head_dim * self.hidden_size
        return self.num_layers * (attention + 3 * self.ffn_size * self.hidden_size)

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def kv_elements(self) -> int:
        """Of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


LLAMA_1B = Shape("Llama 1B", 16, 2048, 8192, 32, 8, 64, 128_256, has_tied_embeddings=True)
LLAMA_8B = Shape("Llama 8B", 32, 4096, 14_336, 32, 8, 128, 128_256, has_tied_embeddings=False)
TINY = Shape("tiny", 2, 64, 96, 4, 2, 16, 128, has_tied_embeddings=True)


def decoder_config(shape: Shape, max_model_len: int) -> DecoderConfig:
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        ffn_size=shape.ffn_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0),
        max_model_len=max_model_len,
        layer_windows=(None,) * shape.num_layers,
        has_tied_embeddings=shape.has_tied_embeddings,
    )


def random_decoder(
    shape: Shape,
    kernels: Kernels,
    device: str,
    *,
    max_model_len: int,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> Decoder:
    """Weights of a spread that keeps activations near unit variance; equal seeds, equal weights
    on one kind of device."""
    config = decoder_config(shape, max_model_len)
    weights = _random_weights(config, kernels, device, dtype, seed)
    shard = shard_of(config, 0, 1)
    return Decoder(
        spec=_spec(shape, config, dtype),
        config=config,
        weights=weights,
        cos_sin=cos_sin_table(config.rope, config.head_dim, max_model_len).to(device),
        kernels=kernels,
        parallel=Parallel(SingleRank(), shard, Split.OUTPUT),
    )


def _random_weights(
    config: DecoderConfig, kernels: Kernels, device: str, dtype: str, seed: int
) -> DecoderWeights:
    generator = torch.Generator(device).manual_seed(seed)
    torch_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    vector_dtype = torch.float32 if device == "cpu" else torch_dtype

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=torch_dtype, device=device)
        return values.normal_(0.0, columns**-0.5, generator=generator)

    norm = torch.ones(config.hidden_size, dtype=vector_dtype, device=device)
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    embedding = matrix(config.vocab_size, hidden) * hidden**0.5
    layers = tuple(
        LayerWeights(
            attention_norm=norm,
            qkv=kernels.pack_linear(matrix(config.qkv_size, hidden)),
            query_norm=None,
            key_norm=None,
            output=kernels.pack_linear(matrix(hidden, heads)),
            ffn_norm=norm,
            gate_up=kernels.pack_linear(matrix(2 * config.ffn_size, hidden)),
            down=kernels.pack_linear(matrix(hidden, config.ffn_size)),
        )
        for _ in range(config.num_layers)
    )
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=norm,
        lm_head=kernels.pack_linear(matrix(config.vocab_size, hidden)),
    )


def _spec(shape: Shape, config: DecoderConfig, dtype: str) -> ModelSpec:
    element_bytes = 4 if dtype == "float32" else 2
    return ModelSpec(
        name=shape.name,
        architecture=config.architecture,
        fingerprint=f"random {shape.name}",
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_model_len=config.max_model_len,
        sliding_window=None,
        dtype=dtype,
        eos_token_ids=(),
        weight_bytes=element_bytes * (shape.linear_weights + 2 * shape.head_weights),
    )
