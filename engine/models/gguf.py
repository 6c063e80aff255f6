"""GGUF files: metadata in the form of ``config.json``, weights dequantised tensor by tensor.

A part of a tensor costs its own rows: each row is a whole number of the format's blocks.

Names, head order and tied embeddings are brought to Hugging Face's form, so that the rest of the
package knows one kind of checkpoint.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from isthmus.common.errors import ModelFileError
from isthmus.common.gguf_file import GgufFile, GgufTensor, read_gguf
from isthmus.engine.models.config import RawConfig, parse_config
from isthmus.engine.models.registry import ARCHITECTURES, unknown_architecture
from isthmus.engine.models.shard import WHOLE, Cut

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQUENCIES = "rope_freqs.weight"
_UNQUANTISED = {
    GGMLQuantizationType.F32: "<f4",
    GGMLQuantizationType.F16: "<f2",
}
# dequantize() works on 16 rows at a time; rows this long keep its numpy calls few and its
# intermediate arrays inside the second-level cache.
_VALUES_PER_ROW = 4096
# Of a part cut by columns: dequantised together, before the other columns are thrown away.
_VALUES_AT_ONCE = 2**20


class GgufCheckpoint:
    """Raises ModelFileError for a damaged file, UnknownArchitectureError for another model."""

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        if file.metadata.get("split.count", 1) not in (0, 1):
            message = f"{path} is one part of a split GGUF; merge it first (gguf-split --merge)"
            raise ModelFileError(message, stage="load")
        with path.open("rb") as opened:
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._tensors = {_model_name(name): tensor for name, tensor in file.tensors.items()}
        divisors = self._tensors.pop(_ROPE_FREQUENCIES, None)
        self.config = _config(file, [] if divisors is None else self._values(divisors).tolist())
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in self._tensors.items()
        }
        kinds = {tensor.type for tensor in self._tensors.values()}
        self.dtype = "float32" if kinds == {GGMLQuantizationType.F32} else "bfloat16"

    def read(self, name: str, cut: Cut = WHOLE) -> torch.Tensor:
        tensor = self._tensors[name]
        values = self._part(_rows_of(tensor, cut.rows), cut.columns)
        if self.config.architecture == "LlamaForCausalLM":
            values = _unpermuted(values, name, tensor.shape[0], self.config)
        return torch.from_numpy(values)

    def digest(self, name: str) -> bytes:
        return xxhash.xxh3_128_digest(self._stored(self._tensors[name]))

    def _part(self, tensor: GgufTensor, columns: range | None) -> npt.NDArray[np.float32]:
        if columns is None:
            return self._values(tensor)
        num_rows, width = tensor.shape
        part = np.empty((num_rows, len(columns)), dtype=np.float32)
        at_once = max(1, _VALUES_AT_ONCE // width)
        for start in range(0, num_rows, at_once):
            rows = range(start, min(start + at_once, num_rows))
            whole = self._values(_rows_of(tensor, rows))
            part[rows.start : rows.stop] = whole[:, columns.start : columns.stop]
        return part

    def _values(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        stored = np.frombuffer(self._stored(tensor), dtype=np.uint8)
        if tensor.type in _UNQUANTISED:
            numbers = stored.view(np.dtype(_UNQUANTISED[tensor.type]))
            return numbers.astype(np.float32).reshape(tensor.shape)
        return _dequantised(stored, tensor)

    def _stored(self, tensor: GgufTensor) -> memoryview:
        return memoryview(self._bytes)[tensor.offset : tensor.offset + tensor.num_bytes]


def _rows_of(tensor: GgufTensor, rows: range | None) -> GgufTensor:
    """The rows as a tensor of their own; None = all."""
    if rows is None:
        return tensor
    row_bytes = tensor.num_bytes // tensor.shape[0]
    return replace(
        tensor,
        shape=(len(rows), *tensor.shape[1:]),
        offset=tensor.offset + rows.start * row_bytes,
        num_bytes=len(rows) * row_bytes,
    )


def _dequantised(stored: npt.NDArray[np.uint8], tensor: GgufTensor) -> npt.NDArray[np.float32]:
    values_per_block, bytes_per_block = GGML_QUANT_SIZES[tensor.type]
    num_blocks = tensor.num_bytes // bytes_per_block
    blocks_per_row = gcd(num_blocks, _VALUES_PER_ROW // values_per_block)
    rows = stored.reshape(-1, blocks_per_row * bytes_per_block)
    try:
        values: npt.NDArray[np.float32] = dequantize(rows, tensor.type)
    except NotImplementedError as error:
        message = f"tensor {tensor.name} is stored as {tensor.type.name}, which cannot be read"
        raise ModelFileError(message, stage="load") from error
    return values.reshape(tensor.shape)


def _unpermuted(
    values: npt.NDArray[np.float32], name: str, num_rows: int, config: RawConfig
) -> npt.NDArray[np.float32]:
    """Undoes the reordering of query and key rows that GGUF files of Llama come with.

    Rotary pairs are (2i, 2i + 1) in the file and (i, i + D/2) here. ``values`` are whole heads of
    a tensor of ``num_rows``.
    """
    if ".q_proj." in name:
        num_heads = config.num_attention_heads
    elif ".k_proj." in name:
        num_heads = config.num_key_value_heads or config.num_attention_heads
    else:
        return values
    num_pairs = num_rows // num_heads // 2
    pairs = values.reshape(-1, num_pairs, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _model_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that has none keeps its own."""
    if name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_PARTS:
        return name
    return f"model.layers.{match[1]}.{_LAYER_PARTS[match[2]]}.{match[3]}"


def _config(file: GgufFile, rope_divisors: list[float]) -> RawConfig:
    metadata = file.metadata
    family = metadata.get("general.architecture", "(none given)")
    names = {item.gguf_name: item.name for item in ARCHITECTURES.values() if item.gguf_name}
    if family not in names:
        raise unknown_architecture(f"{family!r} (GGUF)")

    def own(key: str) -> Any:
        return metadata.get(f"{family}.{key}")

    tokens = metadata.get("tokenizer.ggml.tokens")
    scaling = own("rope.scaling.type")
    config = {
        "architectures": [names[str(family)]],
        "vocab_size": own("vocab_size") or (len(tokens) if isinstance(tokens, list) else None),
        "hidden_size": own("embedding_length"),
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": own("attention.head_count"),
        "num_key_value_heads": own("attention.head_count_kv"),
        "head_dim": own("attention.key_length") or own("rope.dimension_count"),
        "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": own("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "eos_token_id": _end_tokens(metadata),
        "rope_parameters": {
            "rope_type": None if scaling == "none" else scaling,
            "rope_theta": own("rope.freq_base"),
            "factor": own("rope.scaling.factor"),
            "original_max_position_embeddings": own("rope.scaling.original_context_length"),
            "frequency_divisors": rope_divisors,
        },
    }
    given = {key: value for key, value in config.items() if value is not None}
    return parse_config(given, source=str(file.path))


def _end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(token for token in found if token is not None))
