"""A prompt computed on an instance of one size goes on on one of another: the tokens are those of a
single rank, in every pair of sizes. Two KV heads, so that on four ranks each head is on two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from isthmus.common.clock import SystemClock
from isthmus.common.config import EngineConfig, ModelConfig
from isthmus.engine.core import EngineCore
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import Driver, generate, make_prompt, make_request
from tests.support.ranked_handover import RankedInstance, hand_over, ranked_instances, salted
from tests.support.tiny_models import save, tiny_model

# One event loop for all: the engines of a size, and its handshakes, serve every pair.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SIZES = (1, 2, 4)
NUM_BLOCKS = 65
LARGER = {1: 4, 2: 8, 4: 8}  # block sizes of the decode side: like the prefill side's, and not
REQUESTS = [
    make_request("greedy", make_prompt(40), max_tokens=8),  # three chunks
    make_request("edge", make_prompt(17, 1), max_tokens=6),
    make_request("short", make_prompt(3, 2), max_tokens=6),
    make_request("seeded", make_prompt(33, 3), max_tokens=8, temperature=0.9, seed=5),
]

Instances = dict[tuple[str, int], RankedInstance]


def config(block_size: int) -> EngineConfig:
    settings = {"block_size": block_size, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 16}
    return EngineConfig.model_validate(settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = save(tiny_model("llama"), tmp_path_factory.mktemp("model"))
    return ModelConfig(path=str(path), dtype="bfloat16")


@pytest.fixture(scope="module")
def expected(model: ModelConfig) -> list[list[int]]:
    core = EngineCore.build(model, config(4), SystemClock())
    return [outcome.token_ids for outcome in generate(core, *REQUESTS)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def instances(model: ModelConfig) -> AsyncIterator[Instances]:
    specs = [("prefill", size, config(4)) for size in SIZES]
    specs += [("decode", size, config(LARGER[size])) for size in SIZES]
    with ranked_instances(model, specs) as made:
        yield made
        await asyncio.gather(*(instance.manager.close() for instance in made.values()))


@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize("source", SIZES)
async def test_tokens_are_those_of_one_rank(
    instances: Instances, expected: list[list[int]], source: int, target: int
) -> None:
    prefill, decode = instances["prefill", source], instances["decode", target]
    block_bytes = sum(layout.block_bytes for layout in decode.layouts)
    for request, tokens in zip(REQUESTS, expected, strict=True):
        fresh = salted(request, f"{source} to {target}")
        found, num_bytes = await hand_over(prefill, decode, fresh)
        assert found == tokens, request.request_id
        assert num_bytes == -(-len(request.token_ids) // LARGER[target]) * block_bytes


async def test_every_rank_holds_its_heads_of_the_same_kv(instances: Instances) -> None:
    """After each step, chunks without logits included: what is in a store may be sent."""
    request = salted(REQUESTS[0], "alone")
    kv: dict[int, list[torch.Tensor]] = {}
    for size in (1, 4):
        prefill = instances["prefill", size]
        prefill.core.add(request, SequenceMode.PREFILL_ONLY)
        assert prefill.core.step() is not None  # sixteen tokens, four blocks
        table = list(prefill.core.block_table(request.request_id)[:4])
        kv[size] = [store.tensor[table].float() for store in prefill.stores]
        prefill.core.release_hold(request.request_id)
        Driver(prefill.core).settle()
    (whole,) = kv[1]  # [N, L, 2, G, B, D]
    assert whole.count_nonzero()
    for layout, part in zip(instances["prefill", 4].layouts, kv[4], strict=True):
        assert (part == whole[:, :, :, layout.heads.start : layout.heads.stop]).all()
