"""Limits and what is a share of them, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine.bounds import Bounds, ModelShape, read_shape
from benchmarks.limit import Limits, best_seconds, compiled_reader, read_bandwidth
from benchmarks.machine import foreign_seconds

# SmolLM2-135M.
SAMPLE = ModelShape(576, 1536, 30, 9, 3, 64, 49152)
LIMITS = Limits(
    num_threads=2,
    read_bytes_per_s_one_thread=1e10,
    read_bytes_per_s=2e10,
    flops_per_s_one_thread=5e10,
    flops_per_s=1e11,
    flops_by_implementation={},
    foreign_cpu=0.0,
)


def bounds(bytes_per_weight: float = 2.0) -> Bounds:
    return Bounds(SAMPLE, LIMITS, bytes_per_weight)


def test_the_sample_has_135_million_weights() -> None:
    vectors = (2 * SAMPLE.num_layers + 1) * SAMPLE.hidden
    assert SAMPLE.layer_params + SAMPLE.head_params + vectors == 134_515_008
    assert SAMPLE.kv_bytes_per_token == 23_040


def test_a_decode_step_alone_reads_every_weight_once() -> None:
    num_bytes = 2 * (SAMPLE.layer_params + SAMPLE.head_params) + 100 * SAMPLE.kv_bytes_per_token
    assert bounds().decode_step_s(1, 100) == pytest.approx(num_bytes / 2e10)
    assert bounds(1.0).decode_step_s(1, 0) == pytest.approx(bounds().decode_step_s(1, 0) / 2)


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    flops = 2 * 512 * (SAMPLE.layer_params + SAMPLE.head_params)
    assert bounds().decode_step_s(512, 0) == pytest.approx(flops / 1e11)


def test_a_prompt_needs_logits_of_its_last_token_only() -> None:
    flops = 2 * (2048 * SAMPLE.layer_params + SAMPLE.head_params)
    pairs = 2048 * 2049 / 2
    flops += 4 * 30 * 9 * 64 * pairs
    assert bounds().prefill_s(2048) == pytest.approx(flops / 1e11)


def test_a_prompt_of_one_token_is_bound_by_reading() -> None:
    assert bounds(4.0).prefill_s(1) == pytest.approx(bounds(4.0).weights_s())


def test_tokens_per_second_count_prompts_and_steps() -> None:
    alone = bounds()
    seconds = alone.prefill_s(128) + 127 * alone.decode_step_s(1, 192)
    assert alone.tokens_per_s(1, 128, 128) == pytest.approx(128 / seconds)
    assert alone.tokens_per_s(16, 128, 128) > 3 * alone.tokens_per_s(1, 128, 128)


def test_the_shape_is_read_from_a_config_without_head_size(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path) == ModelShape(64, 128, 2, 4, 4, 16, 100)


def test_reading_with_more_threads_reads_everything() -> None:
    seen: list[int] = []
    rate = read_bandwidth(lambda part: seen.append(part.nbytes), 3, 8 * 1000, 0.0)
    assert rate > 0
    assert sum(seen) == 3 * 8 * 1000  # three repetitions at least


def test_the_compiled_reader_reads_every_word(tmp_path: Path) -> None:
    reader = compiled_reader(tmp_path)
    if reader is None:
        pytest.skip("no C compiler")
    assert reader(np.arange(64 * 32, dtype=np.uint64)) == sum(range(64 * 32))


def test_the_best_of_several_counts() -> None:
    calls: list[None] = []
    assert best_seconds(lambda: calls.append(None), 0.0) < 1
    assert len(calls) == 3


def test_foreign_time_is_what_is_busy_and_not_ours() -> None:
    before = {(1, 0.5): 10.0, (2, 0.5): 3.0}
    after = {(1, 0.5): 11.0, (7, 9.0): 0.5}  # one went on, one ended, one started
    assert foreign_seconds(4.0, before, after) == pytest.approx(2.5)
    assert foreign_seconds(1.0, before, after) == 0.0
