"""Sizing KV by the largest step: the arithmetic, and the step itself on CPU tensors."""

from __future__ import annotations

import pytest
import torch

from isthmus.common.clock import VirtualClock
from isthmus.common.config import EngineConfig
from isthmus.common.errors import ConfigError
from isthmus.engine.core import EngineCore
from isthmus.engine.device import HostDevice
from isthmus.engine.kv_store import count_blocks, layout_of
from isthmus.engine.trial_step import kv_budget, largest_batch, run_largest_step
from isthmus.kernels import reference
from tests.support.tiny_model import TinyModel


def test_kv_gets_what_others_and_the_peak_leave_of_the_share() -> None:
    assert kv_budget(total=1000, outside=50, peak=600, share=0.9) == 250
    assert kv_budget(total=1000, outside=50, peak=900, share=0.9) == 0


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "max_model_len", "lengths"),
    [
        (32, 8, 512, [32]),
        (32, 8, 32, [32]),
        (32, 8, 10, [10, 10, 10, 2]),
        (32, 2, 10, [10, 10]),
        (3, 8, 512, [3]),
    ],
)
def test_largest_batch_fills_the_budget(
    budget: int, max_num_seqs: int, max_model_len: int, lengths: list[int]
) -> None:
    config = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    batch = largest_batch(config, 4, max_model_len, torch.device("cpu"))
    assert batch.seq_lens.tolist() == lengths
    assert len(batch.input_ids) == sum(lengths) == batch.query_start[-1]
    assert batch.positions.max() == max(lengths) - 1 == batch.max_seq_len - 1
    assert len(batch.logits_index) == min(max_num_seqs, sum(lengths))
    assert (batch.slot_mapping == -1).all()
    assert not batch.block_table.any()


def test_trial_runs_the_model_once_and_samples() -> None:
    model, config = TinyModel(), EngineConfig(max_num_batched_tokens=40, max_num_seqs=3)
    run_largest_step(model, reference, config, layout_of(model.spec, 4), HostDevice())
    assert model.forward_sizes == [40]


def test_measured_bytes_count_only_where_the_configuration_leaves_it_open() -> None:
    layout = layout_of(TinyModel().spec, 4)
    measured = 7 * layout.block_bytes
    assert count_blocks(EngineConfig(kv_cache_gib=0), layout, measured) == 7
    assert count_blocks(EngineConfig(kv_cache_gib=0, num_blocks=5), layout, measured) == 5
    fixed = EngineConfig(kv_cache_gib=9 * layout.block_bytes / 2**30)
    assert count_blocks(fixed, layout, measured) == 9


def test_memory_cannot_be_left_open_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        EngineCore(TinyModel(), EngineConfig(kv_cache_gib=0), VirtualClock())
