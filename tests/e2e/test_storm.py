"""Misbehaving clients and dying workers leave nothing behind; and the KV really moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.common.cluster import Role
from tests.support.engine_driver import make_prompt
from tests.support.serving import MODEL, Moved, Oracle, serving, write_serving_model
from tests.support.storm import StormShape, storm
from tests.support.storm_cluster import storm_cluster
from tests.support.tiny_tokenizer import build_tiny_backend

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.nixl,
    pytest.mark.fault,
    pytest.mark.e2e,
    pytest.mark.timeout(240),
]

PAIR = (Role.PREFILL, Role.DECODE)
BLOCK = 16
SIDES = {"prefill-0": ("send", "done"), "decode-0": ("receive", "complete")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_serving_model(tmp_path_factory.mktemp("serving") / "tiny")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[Oracle]:
    oracle = Oracle(model)
    yield oracle
    oracle.close()


async def test_a_storm_is_accounted_for_and_no_token_is_wrong(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """The short form of ``benchmarks/storm.py``."""
    shape = StormShape(
        num_requests=100,
        concurrency=8,
        num_prompts=12,
        vocab=build_tiny_backend().get_vocab_size(),
        longest_stay_s=0.3,
    )
    async with storm_cluster(model, oracle, tmp_path) as cluster:
        running = cluster.running
        acts = cluster.schedule(shape.num_requests, num_signals=4, num_cuts=4)
        async with running.supervised():
            tally = await storm(running.url, MODEL, shape, acts)
            await cluster.calm()
        assert tally.unexplained == []
        assert tally.total == shape.num_requests
        assert tally.outcomes["good"] > shape.num_requests * 0.3, tally.outcomes
        assert tally.outcomes["bad_input"]
        assert cluster.done["cut"] == cluster.done["corrupt"] == 2
        assert cluster.done["SIGKILL"] == cluster.done["SIGSTOP"] == 2
        await running.wait_at_rest()
        after = await running.metrics()
        assert after.get("isthmus_requests_inflight") == 0
        assert after.get("isthmus_router_reservations") == 0
        assert not tally.wrong(
            lambda answer: oracle.tokens(answer.prompt, **answer.sampling(shape.max_tokens))
        )
        faults = cluster.faults()
        assert faults.flipped
        assert faults.caught <= faults.flipped
        assert faults.missed == set()
        for n in range(4):
            running.check(await running.ask(make_prompt(40 + 30 * n, n), max_tokens=8))
        await running.wait_at_rest()


async def test_the_kv_really_moves(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Bytes over the connector are exactly the blocks that decode does not have."""
    async with serving(model, oracle, tmp_path, *PAIR) as running:
        cold = make_prompt(10 * BLOCK + 5, 1)
        warm = cold[: 6 * BLOCK] + make_prompt(5 * BLOCK + 1, 2)
        num_computed = 0
        for prompt, num_blocks, num_cached in (
            (cold, 11, 0),
            (cold, 1, 10 * BLOCK),  # only what a full block cannot hold
            (warm, 6, 6 * BLOCK),
            (make_prompt(1, 9), 1, 0),
        ):
            moved = {name: await Moved.mark(running, name) for name in SIDES}
            answer = await running.ask(prompt, max_tokens=6)
            running.check(answer)
            assert answer.headers["x-isthmus-prefill"] == "prefill-0"
            await running.wait_at_rest()
            num_bytes = num_blocks * running.info("decode-0").kv_layout.block_bytes
            for name, (side, state) in SIDES.items():
                by = moved[name].by
                assert await by("isthmus_kv_transfer_bytes_total", side=side) == num_bytes
                assert await by("isthmus_kv_transfers_total", side=side, state=state) == 1
            assert await moved["decode-0"].by("isthmus_computed_prompt_tokens_total") == 0
            num_computed += len(prompt) - num_cached
        prefill = await running.metrics("prefill-0")
        assert prefill.get("isthmus_computed_prompt_tokens_total") == num_computed
        assert (await running.metrics()).get("isthmus_local_prefill_total") == 0
