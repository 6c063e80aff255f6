"""A prefill and a decode worker whose blocks differ in size give what one worker alone gives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.config import ClusterConfig
from isthmus.common.rpc import create_channel
from isthmus.protos.v1 import instance_pb2, instance_pb2_grpc
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import Answer, GatewayStub, make_request, wait_idle
from tests.support.local_cluster import LocalCluster, local_config

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SIZES = (16, 32, 64)
CHUNK = 24  # the token budget of a step: no multiple of a block
LENGTHS = (1, 17, 63, 64, 130)


def config_of(
    block_size: int, connector: str = "local", script: str = "", kv_dtype: str = "auto"
) -> ClusterConfig:
    pool = {
        "engine": {
            "block_size": block_size,
            "num_blocks": 1024 // block_size + 1,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 8,
            "watermark": 0.0,
            "kv_dtype": kv_dtype,
        }
    }
    transfer = {"connector": connector, "quarantine_ms": 200, "fault_script": script}
    return local_config(prefill=pool, decode=pool, transfer=transfer)


@dataclass
class Workers:
    """One worker of each role and block size, and a stream to each decode worker."""

    prefill: dict[int, InstanceInfo]
    decode: dict[int, InstanceInfo]
    streams: dict[int, GatewayStub]

    async def run(self, source: int, target: int, tokens: tuple[int, ...]) -> Answer:
        request = make_request(tokens, max_tokens=6)
        return await self.streams[target].run(request, self.prefill[source])

    async def alone(self, target: int, tokens: tuple[int, ...]) -> list[int]:
        request = make_request(tokens, max_tokens=6, cache_salt="alone")
        return (await self.streams[target].run(request, None)).tokens

    async def flush(self) -> None:
        for info in (*self.prefill.values(), *self.decode.values()):
            async with create_channel(info.address) as channel:
                stub = instance_pb2_grpc.InstanceServiceStub(channel)
                await stub.FlushCache(instance_pb2.FlushCacheRequest(), timeout=60)

    async def wait_idle(self) -> None:
        await wait_idle(*self.prefill.values(), *self.decode.values())


async def start(
    cluster: LocalCluster,
    role: Role,
    size: int,
    connector: str,
    script: str = "",
    kv_dtype: str = "auto",
) -> InstanceInfo:
    config = config_of(size, connector, script, kv_dtype)
    worker = await cluster.start(role, f"{role.value}-{size}", config)
    assert worker.info is not None
    return worker.info


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["auto", "int8"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    """With KV as wide as the weights, and in one byte an element on both sides."""
    async with LocalCluster() as cluster, AsyncExitStack() as stack:
        workers = Workers({}, {}, {})
        for size in SIZES:
            for role, infos in ((Role.PREFILL, workers.prefill), (Role.DECODE, workers.decode)):
                infos[size] = await start(cluster, role, size, "local", kv_dtype=request.param)
            stream = GatewayStub(workers.decode[size])
            workers.streams[size] = await stack.enter_async_context(stream)
        yield workers


@pytest_asyncio.fixture(loop_scope="module")
async def workers(running: Workers) -> AsyncIterator[Workers]:
    """Cold caches before, whole pools after."""
    await running.flush()
    yield running
    await running.wait_idle()


def assert_moved(answer: Answer, target: InstanceInfo, num_blocks: int) -> None:
    assert answer.failed is None, answer.failed
    assert answer.finished is not None
    assert answer.finished.local_reason == "none"
    assert answer.finished.transferred_bytes == num_blocks * target.kv_layout.block_bytes


@pytest.mark.parametrize("target", SIZES)
@pytest.mark.parametrize("source", SIZES)
async def test_pair_equals_one_worker(workers: Workers, source: int, target: int) -> None:
    for length in LENGTHS:
        prompt = make_prompt(length, salt=length)
        answer = await workers.run(source, target, prompt)
        assert answer.tokens == await workers.alone(target, prompt), length
        assert_moved(answer, workers.decode[target], -(-length // target))


@pytest.mark.parametrize(("source", "target"), [(16, 64), (64, 16), (32, 16)])
async def test_a_warm_prefix_is_counted_in_blocks_of_the_target(
    workers: Workers, source: int, target: int
) -> None:
    first, second = make_prompt(130), (*make_prompt(130), *make_prompt(25, salt=3))
    await workers.run(source, target, first)
    answer = await workers.run(source, target, second)
    assert answer.tokens == await workers.alone(target, second)
    assert answer.finished is not None
    assert answer.finished.usage.num_cached_tokens == 130 // source * source
    assert_moved(answer, workers.decode[target], -(-155 // target) - 130 // target)


@pytest.mark.nixl
async def test_a_pair_over_nixl_equals_one_worker() -> None:
    async with LocalCluster() as cluster:
        prefill = await start(cluster, Role.PREFILL, 16, "fake", "nixl|0:flip")
        decode = await start(cluster, Role.DECODE, 32, "fake", "nixl|")
        async with GatewayStub(decode) as stream:
            prompt = make_prompt(40)
            request = make_request(prompt, max_tokens=6, cache_salt="damaged")
            damaged = await stream.run(request, prefill)
            alone = make_request(prompt, max_tokens=6, cache_salt="alone")
            assert damaged.tokens == (await stream.run(alone, None)).tokens
            assert damaged.finished is not None
            assert damaged.finished.local_reason == "prefill_failed"
            for length in LENGTHS:
                prompt = make_prompt(length, salt=length)
                answer = await stream.run(make_request(prompt, max_tokens=6), prefill)
                alone = make_request(prompt, max_tokens=6, cache_salt="alone")
                assert answer.tokens == (await stream.run(alone, None)).tokens
                assert_moved(answer, decode, -(-length // 32))
        await wait_idle(prefill, decode)
