"""Gateways and routers: how many, on which ports, and when they are ready."""

from __future__ import annotations

import socket
from contextlib import closing

import httpx
import pytest

from isthmus.common.clock import SystemClock
from isthmus.common.config import ClusterConfig, GatewayConfig, RouterConfig
from isthmus.common.errors import ConfigError
from isthmus.common.registry import MemoryRegistry, leader_key, routers_prefix
from isthmus.common.registry.routers import ROUTER, RouterRecord
from isthmus.controlplane.front import Front, gateway_addresses
from isthmus.controlplane.preflight import probe_ports
from tests.support.fake_actuator import FakeActuator


def front_of(config: ClusterConfig, registry: MemoryRegistry | None = None) -> Front:
    registry = registry or MemoryRegistry()
    return Front(config, FakeActuator(), SystemClock(), registry, "r:1", lambda _: None)


def config_of(gateways: int, mode: str = "auto", routers: int = 2) -> ClusterConfig:
    return ClusterConfig(
        gateway=GatewayConfig(replicas=gateways, port=9_000),
        router=RouterConfig.model_validate({"mode": mode, "replicas": routers}),
    )


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (config_of(1), ["gateway"]),
        (config_of(2), ["gateway-0", "gateway-1", "router-0", "router-1"]),
        (config_of(2, "embedded"), ["gateway-0", "gateway-1"]),
        (config_of(1, "process", 1), ["gateway", "router"]),
    ],
)
def test_routers_are_apart_where_gateways_are_several(
    config: ClusterConfig, names: list[str]
) -> None:
    assert [process.spec.name for process in front_of(config).processes] == names


def test_each_gateway_has_its_own_port() -> None:
    config = config_of(3)
    ports = [process.spec.config.gateway.port for process in front_of(config).gateways]
    assert ports == [9_000, 9_001, 9_002]
    assert gateway_addresses(config) == [f"127.0.0.1:{port}" for port in ports]


@pytest.mark.asyncio
async def test_ready_when_every_gateway_and_router_answers() -> None:
    registry = MemoryRegistry()
    front = front_of(config_of(2), registry)
    ready = {9_000}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.port in ready else 503)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        assert await front.missing(client) == ["router-0", "router-1", "gateway-1"]
        ready.add(9_001)
        record = RouterRecord("router-1", "127.0.0.1:1", 7)
        await registry.put(f"{routers_prefix('isthmus')}router-1", record.encode())
        await registry.put(f"{routers_prefix('isthmus')}garbage", b"{")
        assert await front.missing(client) == ["router-0"]
        assert await front.leading_router() == ""
        await registry.put(leader_key("isthmus", ROUTER), record.encode())
        assert await front.leading_router() == "router-1"


def test_ports_in_a_row_are_free_or_the_one_that_is_not_is_named() -> None:
    first = probe_ports("127.0.0.1", 0, 3)
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", first + 2))
        taken.listen()
        assert probe_ports("127.0.0.1", first, 2) == first
        with pytest.raises(ConfigError, match=f"port {first + 2} on 127.0.0.1 is in use"):
            probe_ports("127.0.0.1", first, 3)


def test_ports_beyond_the_last_one_are_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="65535"):
        probe_ports("127.0.0.1", 65_535, 2)
