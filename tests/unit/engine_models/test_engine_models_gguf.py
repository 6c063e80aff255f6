"""GGUF files give the model they were written from; the sample model equals transformers'."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from isthmus.common.config import ModelConfig
from isthmus.common.errors import ModelError, ModelFileError, UnknownArchitectureError
from isthmus.common.gguf_file import read_gguf
from isthmus.engine.models.gguf import GgufCheckpoint
from isthmus.engine.models.loader import load_model, load_spec
from tests.support.paged import PagedSequences
from tests.support.tiny_models import reference_logits, save_gguf, tiny_model

F16, F32 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
Q8_0 = gguf.GGMLQuantizationType.Q8_0
TOKENS = random.Random(11).choices(range(96), k=25)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-biased", "qwen2", "qwen3"])
def test_logits_equal_those_of_the_model_it_was_written_from(family: str, tmp_path: Path) -> None:
    reference = tiny_model(family)
    path = save_gguf(reference, tmp_path / "tiny-F32.gguf")
    model = load_model(ModelConfig(path=str(path)), "cpu", 1)
    assert (model.spec.dtype, model.spec.name) == ("float32", "tiny")
    logits = PagedSequences(model).run(0, TOKENS, [20, 4, 1])
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kind", [F16, Q8_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.BF16]
)
def test_dequantised_weights_are_those_of_the_gguf_package(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    path = save_gguf(tiny_model("qwen2"), tmp_path / "tiny.gguf", weight_type=kind)
    checkpoint = GgufCheckpoint(path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    }.items():
        expected = gguf.quants.dequantize(tensors[theirs].data, kind)
        np.testing.assert_array_equal(checkpoint.read(ours).numpy(), expected)
    assert checkpoint.dtype == "bfloat16"


def test_frequency_divisors_stretch_the_rotation(tmp_path: Path) -> None:
    """Llama 3.1's files carry their scaling as a tensor; equal divisors are linear scaling."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    reference = tiny_model("llama", rope_parameters=rope)
    path = save_gguf(reference, tmp_path / "tiny.gguf", rope_divisors=[4.0] * 8)
    model = load_model(ModelConfig(path=str(path)), "cpu", 1)
    logits = PagedSequences(model).run(0, TOKENS, [25])
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_metadata_is_read_like_the_gguf_package_does(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a", "é", "日本", ""])
    writer.add_token_scores([0.5, -1.0, 2.0, 0.0])
    writer.add_token_types([1, 2, 3, 4])
    writer.add_add_bos_token(True)
    writer.add_uint64("big", 2**60)
    writer.add_int8("small", -3)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    for name, field in gguf.GGUFReader(path).fields.items():
        if not name.startswith("GGUF."):
            assert file.metadata[name] == field.contents()
    tensor = file.tensors["t"]
    data = path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes]
    assert tensor.shape == (2, 3)
    assert np.frombuffer(data, dtype="<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_unknown_architecture_names_the_supported(tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(UnknownArchitectureError, match=r"'mamba'.*Qwen3ForCausalLM"):
        load_spec(ModelConfig(path=str(path)))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.999])
def test_cut_file_is_one_error_that_names_it(share: float, tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFileError, match=r"tiny\.gguf is not a readable GGUF file"):
        load_model(ModelConfig(path=str(path)), "cpu", 1)


def test_damaged_header_is_a_model_error_or_a_model(tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    data = path.read_bytes()
    header_size = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    source = random.Random(13)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(header_size)] = source.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            load_spec(ModelConfig(path=str(path)))


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    with pytest.raises(ModelFileError, match="does not begin with the letters GGUF"):
        load_spec(ModelConfig(path=str(path)))
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelFileError, match="version 1 is not supported"):
        load_spec(ModelConfig(path=str(path)))
