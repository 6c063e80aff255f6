"""GGUF files with the weights of the bf16 checkpoint: what is stored, and what is copied."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from benchmarks.peers.gguf_export import export, rounded_to_bf16

MATRIX, VECTOR = "blk.0.ffn_up.weight", "blk.0.ffn_norm.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of one Q4_1 matrix and one vector, as quantised checkpoints are."""
    random = np.random.default_rng(0)
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "é"])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    matrix = random.standard_normal((8, 64), np.float32)
    kind = GGMLQuantizationType.Q4_1
    writer.add_tensor(MATRIX, quants.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor(VECTOR, random.standard_normal(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(path: Path) -> dict[str, tuple[GGMLQuantizationType, np.ndarray]]:
    return {
        tensor.name: (tensor.tensor_type, quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


def test_rounding_is_torch_s() -> None:
    weight = np.random.default_rng(1).standard_normal((3, 32), np.float32)
    expected = torch.from_numpy(weight).bfloat16().float().numpy()
    np.testing.assert_array_equal(rounded_to_bf16(weight), expected)


def test_a_bf16_file_has_the_rounded_weights_exactly(source: Path, tmp_path: Path) -> None:
    before = tensors(source)
    after = tensors(export(source, tmp_path / "out.gguf", "bf16"))
    assert after[MATRIX][0] is GGMLQuantizationType.BF16
    assert after[VECTOR][0] is GGMLQuantizationType.F32
    for name in (MATRIX, VECTOR):
        expected = torch.from_numpy(before[name][1].copy()).bfloat16().float().numpy()
        np.testing.assert_array_equal(after[name][1], expected)


def test_a_q8_0_file_is_within_half_a_step_of_the_rounded_weights(
    source: Path, tmp_path: Path
) -> None:
    expected = rounded_to_bf16(tensors(source)[MATRIX][1]).reshape(8, 2, 32)
    kind, weight = tensors(export(source, tmp_path / "out.gguf", "q8_0"))[MATRIX]
    assert kind is GGMLQuantizationType.Q8_0
    # A step is the block's largest magnitude over 127; its float16 scale adds a little.
    step = np.abs(expected).max(axis=-1, keepdims=True) / 127
    assert (np.abs(weight.reshape(8, 2, 32) - expected) <= 0.51 * step + 1e-3 * step * 127).all()


def test_everything_but_the_format_is_copied(source: Path, tmp_path: Path) -> None:
    fields = gguf.GGUFReader(export(source, tmp_path / "out.gguf", "q8_0")).fields
    assert fields["tokenizer.ggml.tokens"].contents() == ["a", "b", "é"]
    assert fields["tokenizer.ggml.token_type"].contents() == [1, 3, 1]
    assert fields["general.architecture"].contents() == "llama"
    assert fields["llama.block_count"].contents() == 1
    assert fields["general.file_type"].contents() == int(gguf.LlamaFileType.MOSTLY_Q8_0)


def test_a_file_that_exists_is_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_bytes(b"as it was")
    export(source, target, "bf16")
    assert target.read_bytes() == b"as it was"
