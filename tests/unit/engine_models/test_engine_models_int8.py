"""Weights in int8: what of a model they change, and where they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from isthmus.common.config import ModelConfig
from isthmus.common.errors import ConfigError
from isthmus.engine.models.loader import load_model, load_spec
from tests.support.paged import PagedSequences
from tests.support.tiny_models import reference_logits, save, tiny_model

TOKENS = [5, 17, 3, 88, 41, 9, 60, 2, 33]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_model("llama"), tmp_path / "tiny")


def config(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder), quantization="int8")


def test_logits_stay_close_to_those_of_exact_weights(folder: Path) -> None:
    logits = PagedSequences(load_model(config(folder), "cpu", 1)).step({0: TOKENS})[0]
    expected = reference_logits(tiny_model("llama"), TOKENS)
    difference = (logits[-1] - expected[-1]).abs().max()
    assert 0 < difference < 0.2 * expected[-1].std()


def test_kv_of_rounded_weights_is_another_models(folder: Path) -> None:
    exact, rounded = load_spec(ModelConfig(path=str(folder))), load_spec(config(folder))
    assert exact.fingerprint != rounded.fingerprint
    assert rounded == load_model(config(folder), "cpu", 1).spec


def test_weights_take_a_byte_each_beside_the_embedding(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight").numel()
    matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 2)
    vectors = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 1)
    tied = 0 if "lm_head.weight" in tensors else embedding
    assert load_spec(config(folder)).weight_bytes == 4 * (embedding + vectors) + matrices + tied


def test_a_gpu_refuses_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="int8 are for the CPU"):
        load_model(config(folder), "cuda:0", 1)
