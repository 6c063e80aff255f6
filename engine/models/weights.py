"""The weights of a decoder: which tensors a checkpoint must hold, and how they are put together.

Projections that share an input are fused (query, key and value; gate and up), so a layer is four
products. Reading goes tensor by tensor into one buffer per product, in the final dtype: beside the
packed weights, at most one product's parts exist at a time. A rank reads its part of each tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
import xxhash

from isthmus.common.errors import ModelFileError
from isthmus.engine.models.checkpoint import Checkpoint
from isthmus.engine.models.config import DecoderConfig
from isthmus.engine.models.shard import Cut
from isthmus.kernels import Kernels, PackedLinear
from isthmus.kernels.types import Quantization

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor  # [E]
    qkv: PackedLinear  # E → (H + 2G)·D
    query_norm: torch.Tensor | None  # [D]
    key_norm: torch.Tensor | None  # [D]
    output: PackedLinear  # H·D → E
    ffn_norm: torch.Tensor  # [E]
    gate_up: PackedLinear  # E → 2F
    down: PackedLinear  # F → E


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: torch.Tensor  # [V, E], the model's dtype
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [E]
    lm_head: PackedLinear  # E → V


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this configuration holds, under its name there."""
    hidden, ffn, head_dim = config.hidden_size, config.ffn_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    if not config.has_tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    shapes[FINAL_NORM] = (hidden,)
    projections = {
        "self_attn.q_proj": (query, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (key, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (key, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, query, config.has_output_bias),
        "mlp.gate_proj": (ffn, hidden, config.has_ffn_bias),
        "mlp.up_proj": (ffn, hidden, config.has_ffn_bias),
        "mlp.down_proj": (hidden, ffn, config.has_ffn_bias),
    }
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.has_qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """Raises ModelFileError with every tensor that is missing, misshapen or unknown."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and not _is_redundant(name)]
    misshapen = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = []
    if missing:
        problems.append(f"missing tensors: {_some(missing)}")
    if misshapen:
        problems.append(f"wrong shapes: {_some(misshapen)}")
    if unknown:
        problems.append(f"tensors that this architecture does not have: {_some(unknown)}")
    if problems:
        raise ModelFileError(f"{source}: {'; '.join(problems)}", stage="load")


def num_weight_bytes(
    expected: Mapping[str, tuple[int, ...]], dtype: str, quantization: Quantization = "none"
) -> int:
    """The embedding is looked up, not multiplied: it is never quantised, but a tied head is."""
    itemsize = _TORCH_DTYPES[dtype].itemsize
    if quantization == "none":
        return sum(prod(shape) for shape in expected.values()) * itemsize
    head = {} if LM_HEAD in expected else {LM_HEAD: expected[EMBEDDING]}
    return sum(
        prod(shape) * (1 if len(shape) == 2 and name != EMBEDDING else itemsize)
        for name, shape in (*expected.items(), *head.items())
    )


def fingerprint(
    config: DecoderConfig,
    dtype: str,
    digests: Mapping[str, bytes],
    quantization: Quantization = "none",
) -> str:
    """Of configuration, dtype and weights: equal where KV blocks mean the same.

    ``digests`` holds one per tensor, of its bytes as they are stored: no arithmetic of one machine
    enters. The same model in another format counts as another model.
    """
    reach = config.max_model_len if config.rope.depends_on_max_model_len else 0
    identity = replace(config, max_model_len=reach, eos_token_ids=())
    digest = xxhash.xxh3_128()
    numbers = dtype if quantization == "none" else f"{dtype}|{quantization}"
    digest.update(f"{identity}|{numbers}".encode())
    for name, shape in sorted(expected_shapes(config).items()):
        digest.update(f"|{name}|{shape}|".encode())
        digest.update(digests[name])
    return digest.hexdigest()


class WeightReader:
    """Reads a checkpoint into one dtype on one device, and takes digests of tensors on the way.

    ``cuts`` says which part of each tensor is read, ``to_digest`` of which ones the digest is
    wanted. Vectors (norms, biases) are kept in the dtype of activations, which they are applied to.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: Kernels,
        dtype: str,
        device: torch.device,
        cuts: Mapping[str, Cut],
        to_digest: Collection[str],
        quantization: Quantization = "none",
    ) -> None:
        self._quantization = quantization
        self._cuts = cuts
        self._to_digest = to_digest
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._dtype = _TORCH_DTYPES[dtype]
        self._device = device
        self._digests: dict[str, bytes] = {}

    def vector(self, name: str) -> torch.Tensor:
        on_cpu = self._device.type == "cpu"
        dtype = torch.float32 if on_cpu else self._dtype
        return self._read(name).to(device=self._device, dtype=dtype, copy=True)

    def matrix(self, *names: str) -> torch.Tensor:
        """This rank's part of the named matrices, one below the other: ``[rows, columns]``."""
        shapes = [self._cuts[name].shape_of(self._checkpoint.shapes[name]) for name in names]
        num_rows = sum(shape[0] for shape in shapes)
        whole = torch.empty(num_rows, shapes[0][1], dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            whole[start : start + shape[0]] = self._read(name)
            start += shape[0]
        return whole

    def linear(self, prefix: str, *parts: str, has_bias: bool) -> PackedLinear:
        """Projections with one input, fused: their outputs lie side by side."""
        bias = None
        if has_bias:
            bias = torch.cat([self.vector(f"{prefix}{part}.bias") for part in parts])
        return self.pack(self.matrix(*(f"{prefix}{part}.weight" for part in parts)), bias)

    def pack(self, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return self._kernels.pack_linear(matrix, bias, self._quantization)

    def digests(self) -> dict[str, bytes]:
        """Of all tensors whose digest is wanted: also of one of which this rank reads nothing."""
        unread = [name for name in self._to_digest if name not in self._digests]
        return self._digests | {name: self._checkpoint.digest(name) for name in unread}

    def _read(self, name: str) -> torch.Tensor:
        if name in self._to_digest:
            self._digests[name] = self._checkpoint.digest(name)
        return self._checkpoint.read(name, self._cuts[name])


def read_weights(
    config: DecoderConfig, reader: WeightReader, *, adds_bias: bool = True
) -> DecoderWeights:
    """``adds_bias`` False: the biases of sums over ranks are another rank's to add."""
    embedding = reader.matrix(EMBEDDING)
    head = embedding if config.has_tied_embeddings else reader.matrix(LM_HEAD)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(
            _read_layer(config, reader, layer, adds_bias) for layer in range(config.num_layers)
        ),
        final_norm=reader.vector(FINAL_NORM),
        lm_head=reader.pack(head),
    )


def _read_layer(
    config: DecoderConfig, reader: WeightReader, layer: int, adds_bias: bool
) -> LayerWeights:
    prefix = layer_prefix(layer)
    head_norms = ("q_norm", "k_norm") if config.has_qk_norm else ()
    norms = {part: reader.vector(f"{prefix}self_attn.{part}.weight") for part in head_norms}
    return LayerWeights(
        attention_norm=reader.vector(f"{prefix}input_layernorm.weight"),
        qkv=reader.linear(
            f"{prefix}self_attn.", "q_proj", "k_proj", "v_proj", has_bias=config.has_qkv_bias
        ),
        query_norm=norms.get("q_norm"),
        key_norm=norms.get("k_norm"),
        output=reader.linear(
            f"{prefix}self_attn.", "o_proj", has_bias=config.has_output_bias and adds_bias
        ),
        ffn_norm=reader.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=reader.linear(
            f"{prefix}mlp.", "gate_proj", "up_proj", has_bias=config.has_ffn_bias
        ),
        down=reader.linear(
            f"{prefix}mlp.", "down_proj", has_bias=config.has_ffn_bias and adds_bias
        ),
    )


def _is_redundant(name: str) -> bool:
    """Tensors that old or tied checkpoints carry and that follow from others."""
    return name == LM_HEAD or name.endswith("rotary_emb.inv_freq")


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
