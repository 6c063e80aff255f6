"""A whole cluster on one event loop: real registry and gRPC, processes that are futures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.common.clock import SystemClock
from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.config import load_config
from isthmus.common.errors import DeadlineError, InstanceError, InstanceLostError
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.registry import instance_key
from isthmus.common.registry.embedded import EmbeddedRegistryClient
from isthmus.controlplane import client
from isthmus.controlplane.cluster import Cluster
from isthmus.controlplane.progress import Progress, ReadyCluster
from isthmus.controlplane.state_file import ClusterState, find_running
from isthmus.protos.convert.instances import info_to_pb
from tests.support.fake_actuator import FakeActuator
from tests.support.poll import poll_until

INFO = InstanceInfo(
    instance_id=InstanceId("decode-0"),
    role=Role.DECODE,
    state=InstanceState.READY,
    epoch=1,
    address="127.0.0.1:1",
    metrics_address="127.0.0.1:2",
    model="tiny",
    model_path="/tiny",
    kv_layout=KvLayout("m", 1, 1, 8, 4, "float32"),
    num_blocks=8,
    max_num_batched_tokens=16,
    max_num_seqs=4,
    max_model_len=64,
    connector="local",
    pid=7,
)


class Bench:
    """A cluster of one decode instance; the test is its worker and its gateway."""

    def __init__(self, folder: Path, port: int, ready_timeout_ms: int = 60_000) -> None:
        self.folder = folder
        self.config = load_config(
            overrides={
                "name": "bench",
                "prefill": {"replicas": 0},
                "gateway": {"port": port},
                "lifecycle": {"actuator": "process", "ready_timeout_ms": ready_timeout_ms},
                "state_dir": str(folder),
            },
            environ={},
        )
        self.workers = FakeActuator()
        self.gateways = FakeActuator()
        self.said: list[Progress] = []
        self.ready: list[ReadyCluster] = []
        self.cluster = Cluster(
            self.config, self.workers, self.gateways, SystemClock(), self.said.append
        )
        self._server: asyncio.Server | None = None

    @property
    def state(self) -> ClusterState:
        state = find_running(self.folder, "bench")
        assert state is not None
        return state

    async def started(self, *names: str) -> None:
        await poll_until(lambda: set(self.workers.alive()) == set(names))

    async def register(self, info: InstanceInfo) -> None:
        await self.put(info.instance_id, info_to_pb(info).SerializeToString())

    async def put(self, instance_id: str, record: bytes) -> None:
        registry = EmbeddedRegistryClient(self.state.registry_address)
        await registry.put(instance_key("bench", instance_id), record)
        await registry.close()

    async def leave(self, instance_id: str) -> None:
        registry = EmbeddedRegistryClient(self.state.registry_address)
        await registry.delete(instance_key("bench", instance_id))
        await registry.close()

    async def serve(self) -> None:
        """Answers every request with 200, as a ready gateway does."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        port = self.config.gateway.port
        self._server = await asyncio.start_server(answer, "127.0.0.1", port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def warned(self, text: str) -> bool:
        return any(text in progress.message for progress in self.said)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    """Up and ready on entry; stopped in order on exit."""
    task = asyncio.create_task(bench.cluster.run(bench.ready.append))
    try:
        await bench.started("decode-0")
        await bench.register(INFO)
        await bench.serve()
        await poll_until(lambda: bool(bench.ready))
        yield bench
        bench.cluster.request_stop("test")
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bench.close()


@pytest.mark.asyncio
async def test_ready_when_instances_and_gateway_are(tmp_path: Path, free_port: int) -> None:
    async with running(Bench(tmp_path, free_port)) as bench:
        (ready,) = bench.ready
        assert ready.url == f"http://127.0.0.1:{free_port}"
        assert ready.model == "tiny"
        assert [item.instance_id for item in ready.instances] == ["decode-0"]
        await poll_until(lambda: bench.state.is_ready)
        assert bench.gateways.alive() == ["gateway"]
    assert bench.workers.alive() == bench.gateways.alive() == []
    assert find_running(tmp_path, "bench") is None


@pytest.mark.asyncio
async def test_worker_that_ends_while_starting_ends_the_start(
    tmp_path: Path, free_port: int
) -> None:
    bench = Bench(tmp_path, free_port)
    task = asyncio.create_task(bench.cluster.run(bench.ready.append))
    await bench.started("decode-0")
    bench.workers.last("decode-0").end("exit code 2: no such model", is_final=True)
    with pytest.raises(InstanceError, match=r"decode-0 ended while starting .*no such model"):
        await task
    assert bench.gateways.alive() == []
    assert bench.ready == []


@pytest.mark.asyncio
async def test_start_that_takes_too_long_names_what_is_missing(
    tmp_path: Path, free_port: int
) -> None:
    bench = Bench(tmp_path, free_port, ready_timeout_ms=200)
    with pytest.raises(DeadlineError, match=r"not ready after 0\.2 s: decode-0"):
        await bench.cluster.run(bench.ready.append)
    assert bench.workers.alive() == bench.gateways.alive() == []


@pytest.mark.asyncio
async def test_stop_during_the_start_is_heard(tmp_path: Path, free_port: int) -> None:
    bench = Bench(tmp_path, free_port)
    task = asyncio.create_task(bench.cluster.run(bench.ready.append))
    await bench.started("decode-0")
    bench.cluster.request_stop("test")
    await asyncio.wait_for(task, 20)
    assert bench.ready == []
    assert bench.workers.alive() == bench.gateways.alive() == []


@pytest.mark.asyncio
async def test_gateway_that_ends_is_started_again(tmp_path: Path, free_port: int) -> None:
    async with running(Bench(tmp_path, free_port)) as bench:
        bench.gateways.last("gateway").end("ended by SIGKILL")
        await poll_until(lambda: len(bench.gateways.handles) == 2)
        assert bench.warned("gateway ended (ended by SIGKILL)")


@pytest.mark.asyncio
async def test_coming_and_going_of_instances_is_told(tmp_path: Path, free_port: int) -> None:
    async with running(Bench(tmp_path, free_port)) as bench:
        await bench.register(replace(INFO, state=InstanceState.DRAINING))
        await poll_until(lambda: bench.warned("decode-0 is draining"))
        unknown = info_to_pb(replace(INFO, instance_id=InstanceId("new")))
        unknown.role = 99  # type: ignore[assignment]
        await bench.put("new", unknown.SerializeToString())
        await poll_until(lambda: bench.warned("the record of new is unreadable"))
        await bench.leave("decode-0")
        await poll_until(lambda: bench.warned("decode-0 left the registry"))
        assert bench.cluster.info("decode-0") is None


@pytest.mark.asyncio
async def test_control_service_lists_scales_and_stops(tmp_path: Path, free_port: int) -> None:
    async with running(Bench(tmp_path, free_port)) as bench:
        address = bench.state.control_address
        status = await client.cluster_status(address)
        (decode,) = status.instances
        assert (status.cluster, status.model) == ("bench", "tiny")
        assert (decode.instance_id, decode.role, decode.info) == ("decode-0", Role.DECODE, INFO)
        assert decode.load is None  # nobody listens at its address

        assert await client.scale(address, Role.DECODE, 2, drain_ms=1_000) == 1
        await bench.started("decode-0", "decode-1")
        assert await client.scale(address, Role.DECODE, 1, drain_ms=1_000) == 2
        assert bench.workers.alive() == ["decode-0"]

        await client.shut_down(address, "enough")
        await poll_until(lambda: bench.cluster.is_stopping)
        assert bench.warned("stopping (enough)")


@pytest.mark.asyncio
async def test_scaling_before_the_start_is_refused(tmp_path: Path, free_port: int) -> None:
    bench = Bench(tmp_path, free_port)
    with pytest.raises(InstanceError, match="still starting"):
        await bench.cluster.scale(Role.DECODE, 2)
    bench.cluster.request_stop("test")
    await bench.cluster.run(bench.ready.append)


@pytest.mark.asyncio
async def test_control_process_that_is_gone_is_an_error(free_port: int) -> None:
    with pytest.raises(InstanceLostError):
        await client.shut_down(f"127.0.0.1:{free_port}", "x")
