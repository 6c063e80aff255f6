"""What a leader tells its followers, and what becomes of steps that fail."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from isthmus.common.config import EngineConfig
from isthmus.common.errors import InstanceLostError, InternalError
from isthmus.common.layer_progress import LayerCounter
from isthmus.engine.kv_store import KvStore, layout_of
from isthmus.engine.models.types import ForwardBatch
from isthmus.engine.tp_group import SingleRank
from isthmus.engine.tp_steps import (
    Follower,
    LeaderModel,
    common_num_blocks,
    decode_step,
    encode_step,
)
from tests.support.engine_driver import Driver, generate, make_prompt, make_request
from tests.support.tiny_model import TinyModel, make_tiny_core


def batch(logits_index: list[int]) -> ForwardBatch:
    return ForwardBatch(
        input_ids=torch.tensor([5, 6, 7]),
        positions=torch.tensor([0, 1, 0]),
        slot_mapping=torch.tensor([4, 5, 8]),
        query_start=torch.tensor([0, 2, 3], dtype=torch.int32),
        seq_lens=torch.tensor([2, 1], dtype=torch.int32),
        block_table=torch.tensor([[1], [2]], dtype=torch.int32),
        logits_index=torch.tensor(logits_index, dtype=torch.int64),
        max_query_len=2,
        max_seq_len=2,
    )


@pytest.mark.parametrize("logits_index", [[1, 2], []])
def test_a_batch_arrives_as_it_was_sent(logits_index: list[int]) -> None:
    sent = batch(logits_index)
    number, received = decode_step(encode_step(7, sent))
    assert number == 7
    for field in fields(ForwardBatch):
        expected, value = getattr(sent, field.name), getattr(received, field.name)
        if isinstance(expected, torch.Tensor):
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected)
        else:
            assert value == expected


def store_of(model: TinyModel, num_blocks: int = 4, kv_dtype: str = "auto") -> KvStore:
    return KvStore(layout_of(model.spec, 4, kv_dtype), num_blocks, "cpu")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_follower_writes_the_kv_that_the_leader_writes(kv_dtype: str) -> None:
    model = TinyModel()
    mine, theirs = (store_of(model, kv_dtype=kv_dtype) for _ in range(2))
    follower = Follower(TinyModel(), theirs, "cpu")
    leader = LeaderModel(model, follower.run, "cpu")
    for _ in range(2):
        leader.forward(batch([2]), mine.tensor, kv_scales=mine.scales)
    assert mine.tensor.count_nonzero()
    assert torch.equal(theirs.memory, mine.memory)


def test_a_layer_is_final_on_all_ranks_when_the_leader_is_through_the_next() -> None:
    model = TinyModel()
    counter = LayerCounter()
    told: list[int] = []
    model.after_layer = lambda layer: told.append(counter.num_final_layers)
    kv = store_of(model).tensor
    LeaderModel(model, lambda _: None, "cpu").forward(batch([2]), kv, counter)
    assert told == [0, 1]


def test_a_follower_that_missed_a_step_runs_no_other() -> None:
    model = TinyModel()
    follower = Follower(model, store_of(model), "cpu")
    follower.run(encode_step(1, batch([2])))
    with pytest.raises(InternalError, match="step 3 came after step 1"):
        follower.run(encode_step(3, batch([2])))
    assert model.forward_sizes == [3]


def test_tokens_are_those_of_the_model_alone() -> None:
    requests = [
        make_request("greedy", make_prompt(9)),
        make_request("seeded", make_prompt(6, 1), temperature=0.9, seed=5),
    ]
    expected = [outcome.token_ids for outcome in generate(make_tiny_core(), *requests)]
    model = TinyModel()
    follower = Follower(TinyModel(), store_of(model, 65), "cpu")
    core = make_tiny_core(LeaderModel(model, follower.run, "cpu"))  # type: ignore[arg-type]
    assert [outcome.token_ids for outcome in generate(core, *requests)] == expected


def test_a_step_that_fails_on_a_rank_ends_the_engine_and_blames_no_request() -> None:
    model = TinyModel()
    core = make_tiny_core(LeaderModel(model, lambda _: None, "cpu"))  # type: ignore[arg-type]
    core.add(make_request("one", make_prompt(9)))
    driver = Driver(core)
    assert driver.step()
    model.fail_next = 1
    with pytest.raises(InstanceLostError, match="told to fail"):
        core.step()
    assert driver.outcomes["one"].finish_reason is None


def test_a_rank_that_cannot_be_told_ends_the_engine() -> None:
    def refuse(_: bytes) -> None:
        raise InstanceLostError("rank 1 is gone", stage="rank")

    model = TinyModel()
    core = make_tiny_core(LeaderModel(model, refuse, "cpu"))  # type: ignore[arg-type]
    core.add(make_request("one", make_prompt(9)))
    with pytest.raises(InstanceLostError, match="rank 1 is gone"):
        core.step()
    assert model.forward_sizes == []


def test_blocks_are_as_many_as_all_ranks_together_have_room_for() -> None:
    class Twins(SingleRank):
        size = 2

        def exchange(self, payload: bytes) -> list[bytes]:
            return [payload, payload]

    spec = TinyModel().spec
    alone = common_num_blocks(EngineConfig(kv_cache_gib=0.01), spec, SingleRank())
    assert common_num_blocks(EngineConfig(kv_cache_gib=0.01), spec, Twins()) == alone // 2
    assert common_num_blocks(EngineConfig(num_blocks=7), spec, Twins()) == 7
