"""Pairs whose decode worker keeps KV in one byte an element, and pairs with sliding windows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.common.config import ClusterConfig
from isthmus.kernels import reference
from isthmus.kernels.kv_views import TORCH_DTYPES
from tests.support import engine_driver
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import Answer, make_request
from tests.support.local_cluster import LocalWorker, local_config
from tests.support.oracle import reference_tokens
from tests.support.tiny_models import save, tiny_model
from tests.support.worker_pair import LocalPair, local_pair

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

LENGTHS = (1, 17, 64, 130)
NUM_TOKENS = 6


def config_of(block_size: int, kv_dtype: str = "auto", **sections: object) -> ClusterConfig:
    pool = {
        "engine": {
            "block_size": block_size,
            "num_blocks": 1024 // block_size + 1,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 8,
            "watermark": 0.0,
            "kv_dtype": kv_dtype,
        }
    }
    transfer = {"connector": "local", "quarantine_ms": 200}
    tree: dict[str, Any] = {"prefill": pool, "decode": pool, "mixed": pool, "transfer": transfer}
    return local_config(**{**tree, **sections})


@asynccontextmanager
async def pair_of(
    prefill: ClusterConfig, decode: ClusterConfig, windows: tuple[int, ...] = ()
) -> AsyncIterator[LocalPair]:
    async with local_pair(prefill, decode, windows=windows, max_tokens=NUM_TOKENS) as pair:
        yield pair
        await pair.wait_idle()


def assert_moved(answer: Answer, num_bytes: int) -> None:
    assert answer.failed is None, answer.failed
    assert answer.finished is not None
    assert answer.finished.local_reason == "none"
    assert answer.finished.transferred_bytes == num_bytes


@pytest.mark.parametrize(
    ("source", "target", "kv_dtype"),
    [(16, 16, "int8"), (16, 64, "int8"), (64, 16, "int8"), (16, 32, "bfloat16")],
)
async def test_kv_is_converted_to_what_the_decode_worker_writes(
    source: int, target: int, kv_dtype: str
) -> None:
    """The prefill worker keeps float32; the decode worker's store then holds the same bits as if
    its own engine had written those vectors, and it goes on from them."""
    async with pair_of(config_of(source), config_of(target, kv_dtype)) as pair:
        for length in LENGTHS:
            answer = await pair.run(make_prompt(length, salt=length))
            block_bytes = pair.decode_info.kv_layout.block_bytes
            assert_moved(answer, -(-length // target) * block_bytes)
        prompt = make_prompt(130, salt=130)
        kept = cached_kv(pair.prefill, prompt)
        moved, scales = cached_kv(pair.decode, prompt)
        if scales is None:
            assert torch.equal(moved, kept[0].to(TORCH_DTYPES[kv_dtype])[: len(moved)])
        else:
            expected = reference.quantise_kv(kept[0][: len(moved)], torch.int8)
            assert torch.equal(moved, expected[0])
            assert torch.equal(scales, expected[1])


def cached_kv(
    worker: LocalWorker, prompt: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the prompt's full blocks, from the prefix cache: [T, L, 2, G, D] and scales."""
    core = worker.engine
    assert core is not None
    reservation = core.reserve(engine_driver.make_request("look", tuple(prompt)))
    ids = list(reservation.cached_block_ids)
    core.cancel_reservation(reservation, quarantine=False)
    assert ids
    store = core.kv_store
    vectors = store.tensor[ids].movedim(4, 1).flatten(0, 1)
    return vectors, None if store.scales is None else store.scales[ids].movedim(4, 1).flatten(0, 1)


async def test_a_pair_that_cannot_convert_computes_locally_and_says_why() -> None:
    """Whoever routes to it nevertheless: no handshake, no KV that means something else."""
    async with pair_of(config_of(16, "int8"), config_of(16)) as pair:
        assert pair.prefill.engine is not None
        num_steps = pair.prefill.engine.load().steps
        prompt = make_prompt(40)
        answer = await pair.run(prompt)
        assert answer.tokens == await pair.alone(prompt)
        assert answer.finished is not None
        assert answer.finished.local_reason == "prefill_failed"
        assert answer.finished.transferred_bytes == 0
        assert pair.prefill.engine.load().steps == num_steps


# --- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "windows", "kv_dtype"),
    [
        (16, 16, (20, 20), "auto"),
        (16, 32, (0, 20), "auto"),
        (32, 16, (33, 20), "int8"),
    ],
)
async def test_blocks_that_a_window_has_passed_stay_and_tokens_are_the_same(
    source: int, target: int, windows: tuple[int, ...], kv_dtype: str
) -> None:
    configs = config_of(source, kv_dtype), config_of(target, kv_dtype)
    async with pair_of(*configs, windows) as pair:
        for length in (15, 40, 130):
            prompt = make_prompt(length, salt=length)
            answer = await pair.run(prompt)
            assert answer.tokens == await pair.alone(prompt), length
            layout = pair.decode_info.kv_layout
            assert layout.windows == windows
            num_layers = sum(
                -(-length // target) - needed // target for needed in layout.first_needed(length)
            )
            assert_moved(answer, num_layers * layout.layer_bytes)


async def test_a_prompt_that_begins_like_one_whose_head_was_left_out() -> None:
    """The decode worker has only the end of the first prompt: its head is computed again."""
    async with pair_of(config_of(16), config_of(16), (20, 20)) as pair:
        first = make_prompt(130)
        await pair.run(first)
        head = first[:70]
        request = make_request(head, max_tokens=NUM_TOKENS)
        here = await pair.stream.run(request, None)
        assert here.tokens == await pair.alone(head)
        assert here.finished is not None
        assert here.finished.usage.num_cached_tokens == 0
        again = await pair.run((*first, *make_prompt(20, salt=5)))
        assert again.tokens == await pair.alone((*first, *make_prompt(20, salt=5)))


@pytest.mark.parametrize("family", ["mistral-sliding", "qwen2-sliding"])
async def test_a_pair_over_a_sliding_window_is_what_transformers_gives(
    tmp_path: Path, family: str
) -> None:
    """Windows of eight and six tokens: most of a prompt of fifty is never moved."""
    model = save(tiny_model(family), tmp_path / family)
    sections = {"model": {"path": str(model), "dtype": "float32"}}
    prompts = [[1 + (7 * i * i + i) % 90 for i in range(length)] for length in (5, 23, 50)]
    expected = reference_tokens(model, prompts, NUM_TOKENS)
    configs = config_of(4, **sections), config_of(8, **sections)
    async with pair_of(*configs) as pair:
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = await pair.run(prompt)
            assert answer.tokens == tokens
            assert answer.finished is not None
            assert answer.finished.local_reason == "none"
        whole = -(-50 // 8) * pair.decode_info.kv_layout.block_bytes
        assert 0 < answer.finished.transferred_bytes < whole
