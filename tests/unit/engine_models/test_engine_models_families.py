"""Every family gives the logits of transformers, whatever the cut into chunks and batches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from isthmus.common.config import ModelConfig
from isthmus.engine.models.loader import load_model
from tests.support.paged import PagedSequences
from tests.support.tiny_models import FAMILIES, reference_logits, save, tiny_model

TOKENS = random.Random(3).choices(range(96), k=29)
TOLERANCE = 1e-4


def fp32(path: Path) -> ModelConfig:
    return ModelConfig(path=str(path), dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_one_chunk_in_several_and_in_decode_steps(
    family: str, tmp_path: Path
) -> None:
    reference = tiny_model(family)
    expected = reference_logits(reference, TOKENS)
    assert expected.std() > 0.5  # a tolerance of 1e-4 means something
    model = load_model(fp32(save(reference, tmp_path)), "cpu", 1)
    for chunks in ([29], [1, 3, 4, 5, 13, 3], [16, 9, 1, 1, 1, 1], [1] * 29):
        logits = PagedSequences(model).run(0, TOKENS, chunks)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama-tied", "mistral-sliding", "qwen2", "qwen3"])
def test_sequences_in_one_batch_do_not_touch_each_other(family: str, tmp_path: Path) -> None:
    reference = tiny_model(family)
    model = load_model(fp32(save(reference, tmp_path)), "cpu", 1)
    first, second, third = TOKENS, TOKENS[::-1], TOKENS[5:15]
    sequences = PagedSequences(model, num_sequences=3)
    pieces: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    steps = [
        {0: first[:10]},
        {0: first[10:11], 1: second[:7]},  # a decode step beside a chunk
        {2: third, 0: first[11:12], 1: second[7:]},
        {0: first[12:]},
    ]
    for step in steps:
        for index, logits in sequences.step(step).items():
            pieces[index].append(logits)
    for index, tokens in enumerate((first, second, third)):
        expected = reference_logits(reference, tokens)
        torch.testing.assert_close(torch.cat(pieces[index]), expected, atol=TOLERANCE, rtol=0)


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    reference = tiny_model("qwen3")
    whole = load_model(fp32(save(reference, tmp_path / "whole")), "cpu", 1)
    shards = save(reference, tmp_path / "shards", is_sharded=True)
    assert len(list(shards.glob("*.safetensors"))) > 2
    sharded = load_model(fp32(shards), "cpu", 1)
    assert sharded.spec.fingerprint == whole.spec.fingerprint
    logits = PagedSequences(sharded).run(0, TOKENS, [29])
    torch.testing.assert_close(logits, PagedSequences(whole).run(0, TOKENS, [29]), atol=0, rtol=0)


def test_only_the_rows_asked_for_come_back(tmp_path: Path) -> None:
    reference = tiny_model("llama")
    model = load_model(fp32(save(reference, tmp_path)), "cpu", 1)
    sequences = PagedSequences(model, num_sequences=2)
    logits = sequences.step({0: TOKENS[:9], 1: TOKENS[4:7]}, "last")
    assert logits[0].dtype == torch.float32
    expected = reference_logits(reference, TOKENS[:9])[-1:]
    torch.testing.assert_close(logits[0], expected, atol=TOLERANCE, rtol=0)
    expected = reference_logits(reference, TOKENS[4:7])[-1:]
    torch.testing.assert_close(logits[1], expected, atol=TOLERANCE, rtol=0)


def test_chunk_that_needs_no_logits_still_writes_its_kv(tmp_path: Path) -> None:
    reference = tiny_model("llama")
    model = load_model(fp32(save(reference, tmp_path)), "cpu", 1)
    sequences = PagedSequences(model)
    assert sequences.step({0: TOKENS[:20]}, "none")[0].shape == (0, 96)
    logits = sequences.step({0: TOKENS[20:]})[0]
    expected = reference_logits(reference, TOKENS)[20:]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_rounds_weights_and_kv_but_not_activations(tmp_path: Path) -> None:
    reference = tiny_model("qwen2")
    save(reference, tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"), "cpu", 1)
    assert model.spec.dtype == "bfloat16"
    sequences = PagedSequences(model)
    assert sequences.kv.dtype == torch.bfloat16
    logits = sequences.run(0, TOKENS, [20, 9])
    assert logits.dtype == torch.float32
    rounded = {
        name: p.bfloat16().float() if p.ndim == 2 else p
        for name, p in reference.state_dict().items()
    }
    reference.load_state_dict(rounded)
    expected = reference_logits(reference, TOKENS)
    # What is left is the rounding of KV: relative 2^-9 of each key and value.
    torch.testing.assert_close(logits, expected, atol=0.05 * float(expected.std()), rtol=0)
    assert not torch.equal(logits, expected)
