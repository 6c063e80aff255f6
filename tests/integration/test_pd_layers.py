"""A prompt's KV leaves layer by layer while later layers are computed: the answer is the one that a
worker alone gives, whatever goes wrong between two layers, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from isthmus.common.config import ClusterConfig
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import check_integrity, wait_idle
from tests.support.local_cluster import LocalWorker, local_config
from tests.support.poll import poll_until
from tests.support.worker_pair import LocalPair, local_pair

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

BLOCK, CHUNK = 4, 16


def config_of(script: str = "", block_size: int = BLOCK, **engine: object) -> ClusterConfig:
    pool = {
        "engine": {
            "block_size": block_size,
            "num_blocks": 512 // block_size + 1,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 8,
            "watermark": 0.0,
            **engine,
        }
    }
    transfer = {
        "connector": "fake",
        "fault_script": script,
        "quarantine_ms": 200,
        "layers_per_push": 1,
    }
    return local_config(prefill=pool, decode=pool, transfer=transfer)


class BetweenLayers:
    """Holds the prefill instance's model behind one layer, its KV told as final."""

    def __init__(self, worker: LocalWorker, layer: int) -> None:
        self._layer = layer
        self._may_go_on = threading.Event()
        self.is_there = threading.Event()
        worker.model.after_layer = self._after_layer

    def _after_layer(self, layer: int) -> None:
        if layer == self._layer:
            self.is_there.set()
            self._may_go_on.wait(60)

    async def reached(self) -> None:
        await poll_until(self.is_there.is_set, 60)

    def release(self) -> None:
        self._may_go_on.set()


@asynccontextmanager
async def start_pair(
    prefill: ClusterConfig | None = None, decode: ClusterConfig | None = None
) -> AsyncIterator[LocalPair]:
    async with local_pair(prefill or config_of(), decode or config_of()) as pair:
        yield pair


async def sessions(pair: LocalPair) -> dict[str, int]:
    """Of the decode worker, by side and state."""
    return dict((await check_integrity(pair.decode_info)).sessions_by_state)


async def wait_receiving(pair: LocalPair) -> None:
    """Until a write has arrived at the decode instance."""
    async with asyncio.timeout(60):
        while not (await sessions(pair)).get("receive:receiving"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("async_scheduling", ["off", "on"])
@pytest.mark.parametrize(("source", "target"), [(4, 4), (4, 16), (16, 4)])
async def test_pair_equals_one_worker(source: int, target: int, async_scheduling: str) -> None:
    prefill = config_of(block_size=source, async_scheduling=async_scheduling)
    async with start_pair(prefill, config_of(block_size=target)) as pair:
        for length in (1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 150):
            prompt = make_prompt(length, salt=length)
            answer = await pair.run(prompt, max_tokens=6)
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "none"
            num_bytes = -(-length // target) * pair.block_bytes
            assert answer.finished.transferred_bytes == num_bytes
            assert answer.tokens == await pair.alone(prompt, max_tokens=6), length
        grown = (*make_prompt(150, salt=150), *make_prompt(9))  # a prefix that both have
        assert (await pair.run(grown)).tokens == await pair.alone(grown)
        await pair.wait_idle()


async def test_a_layer_arrives_while_the_next_one_is_computed() -> None:
    async with start_pair() as pair:
        step = BetweenLayers(pair.prefill, 0)
        answer = await pair.submit(make_prompt(8), max_tokens=5)
        await step.reached()
        await wait_receiving(pair)
        assert answer.tokens == []
        step.release()
        await answer.end()
        assert answer.tokens == await pair.alone(make_prompt(8), max_tokens=5)
        await pair.wait_idle()


async def test_a_request_that_ends_with_its_first_token_leaves_nothing() -> None:
    async with start_pair() as pair:
        answer = await pair.run(max_tokens=1)
        assert answer.tokens == await pair.alone(max_tokens=1)
        await pair.wait_idle()


@pytest.mark.fault
async def test_a_cancel_between_two_layers_leaves_nothing() -> None:
    async with start_pair() as pair:
        step = BetweenLayers(pair.prefill, 0)
        answer = await pair.submit()
        await step.reached()
        await wait_receiving(pair)
        await pair.stream.abort(answer)
        await wait_idle(pair.decode_info)  # what was on its way has arrived: the sender says so
        step.release()
        await pair.wait_idle()
        assert answer.tokens == []
        pair.prefill.model.after_layer = lambda layer: None
        assert (await pair.run()).tokens == await pair.alone()


@pytest.mark.fault
async def test_a_step_that_fails_between_two_layers_costs_only_latency() -> None:
    async with start_pair() as pair:
        received = threading.Event()

        def fail(layer: int) -> None:
            pair.prefill.model.after_layer = lambda layer: None
            assert received.wait(60)
            raise RuntimeError("the model broke")

        pair.prefill.model.after_layer = fail
        answer = await pair.submit(max_tokens=9)
        await wait_receiving(pair)
        received.set()
        await answer.end()
        assert answer.finished is not None, answer.failed
        assert answer.finished.local_reason == "prefill_failed"
        assert answer.tokens == await pair.alone(max_tokens=9)
        await pair.wait_idle()


@pytest.mark.fault
async def test_an_instance_that_ends_between_two_layers_costs_only_latency() -> None:
    async with start_pair() as pair:
        step = BetweenLayers(pair.prefill, 0)
        answer = await pair.submit(max_tokens=9)
        await step.reached()
        await wait_receiving(pair)
        pair.prefill.stop.fail("test")
        await answer.end()
        step.release()
        assert answer.finished is not None, answer.failed
        assert answer.finished.local_reason == "prefill_failed"
        assert answer.tokens == await pair.alone(max_tokens=9)
        await wait_idle(pair.decode_info)


async def check_falls_back(pair: LocalPair) -> None:
    answer = await pair.run(max_tokens=9)
    assert answer.finished is not None, answer.failed
    assert answer.finished.local_reason == "prefill_failed"
    assert answer.tokens == await pair.alone(max_tokens=9)
    await wait_idle(pair.decode_info)


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["0:corrupt", "0:flip", "2:flip", "0:refuse", "2:fail"])
async def test_a_fault_of_one_layer_costs_only_latency(fault: str) -> None:
    """Even writes bring the first layer, while the step runs."""
    async with start_pair(config_of(fault)) as pair:
        await check_falls_back(pair)
        good = await pair.run(make_prompt(40, salt=2), max_tokens=5)
        assert good.finished is not None
        assert good.finished.local_reason == "none"
        assert good.tokens == await pair.alone(make_prompt(40, salt=2), max_tokens=5)


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["0:drop", "4:hang"])
async def test_a_layer_that_never_comes_costs_only_latency(fault: str) -> None:
    """Nothing but the decode instance's patience notices it. On a starving machine that may end
    the transfers behind it, too, so they are held to their tokens alone."""
    transfer = config_of().transfer.model_copy(update={"deadline_ms": 700})
    decode = config_of().model_copy(update={"transfer": transfer})
    async with start_pair(config_of(fault), decode) as pair:
        await check_falls_back(pair)
        good = await pair.run(make_prompt(40, salt=2), max_tokens=5)
        assert good.finished is not None, good.failed
        assert good.tokens == await pair.alone(make_prompt(40, salt=2), max_tokens=5)


@pytest.mark.fault
@pytest.mark.parametrize("fault", ["0:delay=30", "0:duplicate"])
async def test_layers_may_come_late_and_twice(fault: str) -> None:
    async with start_pair(config_of(fault)) as pair:
        answer = await pair.run(max_tokens=9)
        assert answer.finished is not None, answer.failed
        assert answer.finished.local_reason == "none"
        assert answer.tokens == await pair.alone(max_tokens=9)
        await pair.wait_idle()


@pytest.mark.nixl
@pytest.mark.parametrize("target", [16, 32])
async def test_a_pair_over_nixl_equals_one_worker(target: int) -> None:
    async with start_pair(config_of("nixl|", 16), config_of("nixl|", target)) as pair:
        for length in (1, 40, 150):
            prompt = make_prompt(length, salt=length)
            answer = await pair.run(prompt, max_tokens=6)
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "none"
            assert answer.tokens == await pair.alone(prompt, max_tokens=6), length
        await pair.wait_idle()
