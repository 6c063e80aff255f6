"""Prefill and decode instances of several rank processes over the default connector."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.config import ClusterConfig
from isthmus.controlplane.state_file import process_start
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import GatewayStub, check_integrity, make_request, wait_idle
from tests.support.poll import poll_until
from tests.support.tiny_models import save, tiny_model
from tests.support.worker_process import WorkerCluster, WorkerProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.nixl, pytest.mark.timeout(240)]

LENGTHS = (1, 17, 100, 33, 60, 16)  # at once


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("llama", max_position_embeddings=512), tmp_path_factory.mktemp("model"))


def make_config(model_path: Path, tp_size: int = 1, **transfer: Any) -> ClusterConfig:
    engine = {"num_blocks": 100, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    pool = {"engine": {**engine, "tp_size": tp_size}}
    return ClusterConfig.model_validate(
        {
            "name": "tp-pairs",
            "model": {"path": str(model_path), "dtype": "float32"},
            "prefill": pool,
            "decode": pool,
            "transfer": {"quarantine_ms": 300, **transfer},
            "registry": {"lease_ms": 2_000},
        }
    )


class Fleet:
    """Instances by role and number of ranks."""

    def __init__(self, cluster: WorkerCluster, model_path: Path) -> None:
        self.cluster = cluster
        self._model_path = model_path
        self.workers: dict[tuple[Role, int], WorkerProcess] = {}

    async def start(self, *specs: tuple[Role, int], **transfer: Any) -> None:
        for role, size in specs:
            config = make_config(self._model_path, size, **transfer)
            name = f"{role.value}-{size}"
            self.workers[role, size] = self.cluster.spawn(role, name, config)
        for spec in specs:
            await self.cluster.wait_ready(self.workers[spec])

    def info(self, role: Role, size: int) -> InstanceInfo:
        info = self.workers[role, size].info
        assert info is not None
        return info

    async def end(self, role: Role, size: int) -> None:
        """A drain ends every rank in order."""
        worker = self.workers[role, size]
        worker.signal(signal.SIGTERM)
        assert await worker.wait(30) == 0, worker.log_text()
        await wait_gone(self.info(role, size))


async def wait_gone(info: InstanceInfo) -> None:
    await poll_until(lambda: all(process_start(pid) is None for pid in info.rank_pids), 20.0)


@asynccontextmanager
async def start_fleet(
    model_path: Path, folder: Path, *specs: tuple[Role, int], **transfer: Any
) -> AsyncIterator[Fleet]:
    async with WorkerCluster(make_config(model_path), folder) as cluster:
        fleet = Fleet(cluster, model_path)
        await fleet.start(*specs, **transfer)
        yield fleet


async def serve(fleet: Fleet, source: int, target: int) -> None:
    """Prompts of the pair have the tokens of the decode instance alone, and all KV has moved."""
    prefill, decode = fleet.info(Role.PREFILL, source), fleet.info(Role.DECODE, target)
    name = f"{source} to {target}"
    async with GatewayStub(decode) as stream:
        prompts = [make_prompt(length, salt=length) for length in LENGTHS]
        requests = [make_request(prompt, max_tokens=6, cache_salt=name) for prompt in prompts]
        answers = await asyncio.gather(*(stream.run(request, prefill) for request in requests))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "none"
            layout = decode.kv_layout
            whole = layout.instance_token_bytes * layout.block_size
            assert answer.finished.transferred_bytes == -(-len(prompt) // layout.block_size) * whole
            alone = make_request(prompt, max_tokens=6, cache_salt=f"{name} alone")
            assert answer.tokens == (await stream.run(alone, None)).tokens
    await wait_idle(prefill, decode)


async def test_pairs_of_unlike_sizes_serve_and_leave_in_order(
    model_path: Path, tmp_path: Path
) -> None:
    specs = [(role, size) for role in (Role.PREFILL, Role.DECODE) for size in (1, 2)]
    async with start_fleet(model_path, tmp_path, *specs) as fleet:
        for source, target in ((2, 1), (1, 2), (2, 2)):
            await serve(fleet, source, target)
        for spec in specs:
            await fleet.end(*spec)


@pytest.mark.slow
async def test_pairs_with_copies_of_heads_serve(model_path: Path, tmp_path: Path) -> None:
    specs = [(role, size) for role in (Role.PREFILL, Role.DECODE) for size in (1, 2, 4)]
    async with start_fleet(model_path, tmp_path, *specs) as fleet:
        for source, target in ((1, 4), (4, 1), (4, 2), (2, 4), (4, 4)):
            await serve(fleet, source, target)


@pytest.mark.fault
async def test_a_follower_killed_while_it_sends_costs_only_latency(
    model_path: Path, tmp_path: Path
) -> None:
    """Every write of the prefill side hangs until its follower is killed. The decode side computes
    the prompt itself, its blocks come back, and so does the instance, with the next epoch."""
    faulty = {"connector": "fake", "fault_script": "nixl|0+:hang"}
    async with start_fleet(model_path, tmp_path, (Role.PREFILL, 2), **faulty) as fleet:
        await fleet.start((Role.DECODE, 1), connector="fake", fault_script="nixl|")
        prefill, decode = fleet.info(Role.PREFILL, 2), fleet.info(Role.DECODE, 1)
        async with GatewayStub(decode) as stream:
            prompt = make_prompt(100)
            answer = await stream.submit(make_request(prompt, max_tokens=8), prefill)
            await wait_sending(prefill)
            os.kill(prefill.rank_pids[1], signal.SIGKILL)
            await answer.end(60)
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "prefill_failed"
            alone = make_request(prompt, max_tokens=8, cache_salt="alone")
            assert answer.tokens == (await stream.run(alone, None)).tokens
            assert await fleet.workers[Role.PREFILL, 2].wait(30) == 1
            await wait_gone(prefill)
            await wait_idle(decode, timeout_s=20)

            await fleet.start((Role.PREFILL, 2), connector="fake", fault_script="nixl|")
            again = fleet.info(Role.PREFILL, 2)
            assert again.epoch == prefill.epoch + 1
            prompt = make_prompt(100, salt=3)
            answer = await stream.run(make_request(prompt, max_tokens=8), again)
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "none"
        await wait_idle(again, decode)


@pytest.mark.fault
async def test_a_follower_killed_while_it_receives_ends_its_instance_alone(
    model_path: Path, tmp_path: Path
) -> None:
    faulty = {"connector": "fake", "fault_script": "nixl|0:hang"}
    async with start_fleet(model_path, tmp_path, (Role.PREFILL, 1), **faulty) as fleet:
        await fleet.start((Role.DECODE, 2), connector="fake", fault_script="nixl|")
        prefill, decode = fleet.info(Role.PREFILL, 1), fleet.info(Role.DECODE, 2)
        async with GatewayStub(decode) as stream:
            await stream.submit(make_request(make_prompt(100), max_tokens=8), prefill)
            await wait_sending(prefill)
            os.kill(decode.rank_pids[1], signal.SIGKILL)
            assert await fleet.workers[Role.DECODE, 2].wait(30) == 1
            await wait_gone(decode)
        await wait_blocks_back(prefill)

        await fleet.start((Role.DECODE, 2), connector="fake", fault_script="nixl|")
        again = fleet.info(Role.DECODE, 2)
        assert again.epoch == decode.epoch + 1
        async with GatewayStub(again) as stream:
            answer = await stream.run(make_request(make_prompt(100), max_tokens=8), prefill)
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "none"
        await wait_idle(prefill, again)


async def wait_blocks_back(info: InstanceInfo) -> None:
    """Until no block is held. A write that hangs by script ends with its peer, which leaves when
    its successor comes."""
    async with asyncio.timeout(60):
        reply = await check_integrity(info)
        while reply.load.free_blocks != reply.load.num_blocks:
            reply = await check_integrity(info)
    assert reply.is_clean, reply.problem


async def wait_sending(prefill: InstanceInfo) -> None:
    """Until all of a prompt is pushed and hangs."""
    states: dict[str, int] = {}
    async with asyncio.timeout(60):
        while states.get("send:draining_nic") != 1:
            states = dict((await check_integrity(prefill)).sessions_by_state)
