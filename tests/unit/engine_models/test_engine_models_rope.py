"""Rotary tables equal those of transformers for every scaling, and so do whole models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from isthmus.common.config import ModelConfig
from isthmus.common.errors import ConfigError, ModelFileError, UnknownArchitectureError
from isthmus.engine.models import registry
from isthmus.engine.models.config import parse_config, with_max_model_len
from isthmus.engine.models.loader import load_model, load_spec
from isthmus.engine.models.rope import cos_sin_table
from tests.support.paged import PagedSequences
from tests.support.tiny_models import SIZES, reference_logits, save, tiny_model

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn-tuned": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
}
TOKENS = random.Random(5).choices(range(96), k=60)


def table(config: dict[str, Any], max_model_len: int) -> torch.Tensor:
    raw = parse_config({"architectures": ["LlamaForCausalLM"], **SIZES, **config}, "test")
    decoder = with_max_model_len(registry.configure(raw), max_model_len)
    return cos_sin_table(decoder.rope, decoder.head_dim, decoder.max_model_len)


def reference_table(rope: dict[str, Any], length: int, **config: Any) -> torch.Tensor:
    embedding = LlamaRotaryEmbedding(LlamaConfig(**SIZES, **config, rope_parameters=dict(rope)))
    cos, sin = embedding(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers_in_both_ways_of_writing_the_scaling(name: str) -> None:
    rope = SCALINGS[name]
    expected = reference_table(rope, 64)
    new = table({"rope_parameters": rope}, 64)
    torch.testing.assert_close(new, expected, atol=1e-5, rtol=0)
    old = dict(rope)
    theta = old.pop("rope_theta")
    old["type"] = old.pop("rope_type")
    torch.testing.assert_close(
        table({"rope_theta": theta, "rope_scaling": old}, 64), new, atol=0, rtol=0
    )


def test_dynamic_scaling_is_that_of_the_longest_sequence() -> None:
    rope = SCALINGS["dynamic"]
    expected = reference_table(rope, 200)  # transformers takes the sequence's own length
    stretched = table({"rope_parameters": rope}, 200)
    torch.testing.assert_close(stretched, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(stretched[:64], table({"rope_parameters": rope}, 64), atol=1e-2)


@pytest.mark.parametrize("name", SCALINGS)
def test_model_with_scaling_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = tiny_model("llama", rope_parameters=dict(SCALINGS[name]))
    expected = reference_logits(reference, TOKENS)
    model = load_model(ModelConfig(path=str(save(reference, tmp_path))), "cpu", 1)
    logits = PagedSequences(model).run(0, TOKENS, [25, 31, 1, 3])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


def test_longest_sequence_follows_the_scaling(tmp_path: Path) -> None:
    def spec_of(name: str, max_model_len: int = 0) -> int:
        folder = tmp_path / name
        if not folder.exists():
            save(tiny_model("llama", rope_parameters=dict(SCALINGS[name])), folder)
        return load_spec(ModelConfig(path=str(folder), max_model_len=max_model_len)).max_model_len

    assert spec_of("default") == 64
    assert spec_of("default", 17) == 17
    with pytest.raises(ConfigError, match="max_model_len 65 is beyond the model's limit of 64"):
        spec_of("default", 65)
    assert spec_of("yarn-tuned") == 256
    assert spec_of("dynamic") == 64
    assert spec_of("dynamic", 256) == 256
    with pytest.raises(ConfigError, match="limit of 256"):
        spec_of("dynamic", 257)


def test_unusable_scalings_are_named() -> None:
    with pytest.raises(UnknownArchitectureError, match=r"'longrope'.*supported: default, linear"):
        table({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, 0)
    with pytest.raises(ModelFileError, match="'llama3' lacks its 'low_freq_factor'"):
        table({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, 0)
    with pytest.raises(UnknownArchitectureError, match=r"partial_rotary_factor 0\.5"):
        table({"partial_rotary_factor": 0.5}, 0)
