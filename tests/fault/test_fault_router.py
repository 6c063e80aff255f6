"""The router that leads is killed under load: no request is lost, and another one leads."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from isthmus.common.config import ClusterConfig, RouterConfig
from isthmus.common.registry import instance_key
from isthmus.common.registry.embedded import EmbeddedRegistryClient, RegistryServer
from isthmus.gateway.main import GatewayArgs
from isthmus.gateway.remote_router import FALLBACK_PREFIX, RemoteDecider
from isthmus.gateway.routing import Routing
from isthmus.protos.convert.instances import info_to_pb
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, served
from tests.support.poll import poll_until
from tests.support.worker_process import ChildProcess

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

CONFIG = ClusterConfig(router=RouterConfig(mode="process"))
PATIENCE_S = 90.0  # a fork server may have to load torch first
NUM_OPEN = 12


@dataclass
class Routed:
    """One gateway, two fake decode instances, two router processes of which one leads: on a machine
    that starves, not for ever the same one."""

    gateway: RunningGateway
    decider: RemoteDecider
    fakes: list[FakeDecode]
    routers: dict[str, ChildProcess]
    leaders: list[str] = field(default_factory=list)

    @property
    def leader(self) -> str:
        return self.decider.leader.router_id if self.decider.leader is not None else ""

    async def led_by(self, name: str) -> None:
        await poll_until(lambda: self.leader == name, PATIENCE_S)

    async def led_by_any(self) -> str:
        """By whom."""
        await poll_until(lambda: self.leader != "", PATIENCE_S)
        return self.leader

    def other(self, name: str) -> str:
        return next(router for router in self.routers if router != name)

    async def complete(self, client: httpx.AsyncClient, prompt: str = "x") -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "stream": True, "max_tokens": 3}
        return await client.post("/v1/completions", json=body)


@asynccontextmanager
async def routed(folder: Path) -> AsyncIterator[Routed]:
    async with AsyncExitStack() as stack:
        registry_server = RegistryServer()
        address = await registry_server.start("127.0.0.1", 0)
        stack.push_async_callback(registry_server.stop)
        registry = EmbeddedRegistryClient(address)
        stack.push_async_callback(registry.close)
        fakes = [FakeDecode("decode-0"), FakeDecode("decode-1")]
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.kill)
            data = info_to_pb(fake.info).SerializeToString()
            await registry.put(instance_key(CONFIG.name, fake.instance_id), data)
        routing = Routing(GatewayArgs(CONFIG, address, "gateway-0"), registry)
        stack.push_async_callback(routing.close)
        decider = routing.decider
        assert isinstance(decider, RemoteDecider)
        gateway = await stack.enter_async_context(served(folder, CONFIG, routing.router, decider))
        client = gateway.gateway.decode_client
        state, facts = routing.router.state, gateway.gateway.router
        state.on_change = lambda: client.follow(facts.decode_refs())
        await routing.start()
        made = Routed(gateway, decider, fakes, {})
        for name in ("router-0", "router-1"):
            made.routers[name] = start_router(name, address, folder)
            stack.callback(made.routers[name].end)
            await made.led_by_any()
        await poll_until(lambda: all(client.is_live(fake.info.instance_id) for fake in fakes))
        yield made
        await poll_until(lambda: client.num_requests() == 0)
        state.on_change = None


def start_router(name: str, registry: str, folder: Path) -> ChildProcess:
    file = folder / f"{name}.json"
    file.write_text(CONFIG.model_dump_json(), encoding="utf-8")
    argv = ["--registry", registry, "--router-id", name, "--config-json", str(file)]
    return ChildProcess("isthmus.router.main", argv, folder / f"{name}.log", fresh=False)


@pytest.mark.asyncio
async def test_a_killed_leader_loses_no_request_and_the_standby_leads(tmp_path: Path) -> None:
    async with routed(tmp_path) as cluster, cluster.gateway.http() as client:
        client.timeout = httpx.Timeout(60)
        gate = asyncio.Event()
        tokens = cluster.gateway.ids("the one two")
        for fake in cluster.fakes:
            fake.script = lambda _: Script(tokens, gate=gate, gate_at=1)
        running = [asyncio.create_task(cluster.complete(client)) for _ in range(NUM_OPEN)]
        await poll_until(lambda: sum(len(f.submitted) for f in cluster.fakes) == NUM_OPEN, 60)
        killed = await cluster.led_by_any()
        os.kill(cluster.routers[killed].pid, signal.SIGKILL)
        later = [asyncio.create_task(cluster.complete(client)) for _ in range(NUM_OPEN)]
        await poll_until(lambda: sum(len(f.submitted) for f in cluster.fakes) == 2 * NUM_OPEN, 60)
        await cluster.led_by(cluster.other(killed))
        gate.set()
        answers = [*await asyncio.gather(*running), *await asyncio.gather(*later)]
        assert [answer.status_code for answer in answers] == [200] * 2 * NUM_OPEN
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        async with asyncio.timeout(PATIENCE_S):
            while FALLBACK_PREFIX in (await cluster.complete(client)).headers["x-isthmus-policy"]:
                pass  # the standby may lose its lease for a while on a machine that starves


@pytest.mark.asyncio
async def test_a_leader_that_is_stopped_is_replaced_and_comes_back_as_standby(
    tmp_path: Path,
) -> None:
    """Its questions are asked again: it answers nobody, and its connections stay open."""
    async with routed(tmp_path) as cluster, cluster.gateway.http() as client:
        client.timeout = httpx.Timeout(60)
        stopped = await cluster.led_by_any()
        standby = cluster.other(stopped)
        os.kill(cluster.routers[stopped].pid, signal.SIGSTOP)
        answers = await asyncio.gather(*(cluster.complete(client) for _ in range(NUM_OPEN)))
        assert [answer.status_code for answer in answers] == [200] * NUM_OPEN
        await cluster.led_by(standby)
        os.kill(cluster.routers[stopped].pid, signal.SIGCONT)
        os.kill(cluster.routers[standby].pid, signal.SIGTERM)
        assert await cluster.routers[standby].wait() == 0
        await cluster.led_by(stopped)
        assert (await cluster.complete(client)).status_code == 200


@pytest.mark.asyncio
async def test_without_any_router_requests_are_served_and_say_so(tmp_path: Path) -> None:
    async with routed(tmp_path) as cluster, cluster.gateway.http() as client:
        for process in cluster.routers.values():
            os.kill(process.pid, signal.SIGKILL)
        await cluster.led_by("")
        answer = await cluster.complete(client)
        assert answer.status_code == 200
        assert answer.headers["x-isthmus-policy"] == f"{FALLBACK_PREFIX}least_loaded"
        assert answer.headers["x-isthmus-decode"] in {"decode-0", "decode-1"}
