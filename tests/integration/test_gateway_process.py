"""The gateway as a process: it finds the cluster through the registry and ends when told to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from isthmus.common.config import ClusterConfig, GatewayConfig, ModelConfig
from isthmus.common.registry.base import instance_key
from isthmus.common.registry.embedded import EmbeddedRegistryClient, RegistryServer
from isthmus.protos.convert.instances import info_to_pb
from tests.support.fake_decode import FakeDecode, Script
from tests.support.tiny_tokenizer import write_tiny_model

START_S = 30.0


@asynccontextmanager
async def gateway_process(
    folder: Path, registry: str, port: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    model = write_tiny_model(folder / "tiny")
    config = ClusterConfig(model=ModelConfig(path=str(model)), gateway=GatewayConfig(port=port))
    file = folder / "config.json"
    file.write_text(config.model_dump_json())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "isthmus.gateway.main",
        "--config-json",
        str(file),
        "--registry",
        registry,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.asyncio
async def test_it_serves_what_is_registered_and_finishes_streams_before_it_ends(
    tmp_path: Path, free_port: int
) -> None:
    gate = asyncio.Event()
    fake = FakeDecode(script=lambda _: Script((3 + ord("a"), 3 + ord("b")), gate=gate, gate_at=1))
    await fake.start()
    server = RegistryServer()
    address = await server.start("127.0.0.1", 0)
    registry = EmbeddedRegistryClient(address)
    try:
        async with gateway_process(tmp_path, address, free_port) as process:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{free_port}", timeout=60
            ) as client:
                assert await status(client, "/ready", 503) == 503
                record = info_to_pb(fake.info).SerializeToString()
                await registry.put(instance_key("isthmus", fake.instance_id), record)
                assert await status(client, "/ready", 200) == 200
                body = {"model": "tiny", "prompt": "x", "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    parts = answer.aiter_text()
                    received = await anext(parts)
                    process.send_signal(signal.SIGTERM)
                    await refused(client)
                    gate.set()
                    async for part in parts:
                        received += part
            assert received.endswith("data: [DONE]\n\n")
            async with asyncio.timeout(START_S):
                assert await process.wait() == 0
    finally:
        await registry.close()
        await server.stop()
        await fake.kill()


@pytest.mark.asyncio
async def test_a_port_in_use_is_one_sentence_and_code_1(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with taken, gateway_process(tmp_path, "127.0.0.1:1", port) as process:
        async with asyncio.timeout(START_S):
            _, stderr = await process.communicate()
        assert process.returncode == 1
        lines = stderr.decode().strip().splitlines()
        assert len(lines) == 1
        assert f"127.0.0.1:{port}" in lines[0]


@pytest.mark.asyncio
async def test_a_model_that_is_not_there_is_one_sentence_and_code_1(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "isthmus.gateway.main",
        "--registry",
        "127.0.0.1:1",
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "ISTHMUS_PROCESS_CONFIG": '{"model": {"path": "/no/such"}, "gateway": {"port": 0}}',
        },
    )
    async with asyncio.timeout(START_S):
        _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode().strip() == "there is no model at /no/such"


async def status(client: httpx.AsyncClient, path: str, wanted: int) -> int:
    """Asks until the wanted status comes or the time is up."""
    last = 0
    async with asyncio.timeout(START_S):
        while last != wanted:
            try:
                last = (await client.get(path)).status_code
            except httpx.TransportError:
                await asyncio.sleep(0.05)
    return last


async def refused(client: httpx.AsyncClient) -> None:
    """Returns when the process has stopped listening."""
    async with asyncio.timeout(START_S), httpx.AsyncClient(base_url=client.base_url) as fresh:
        while True:
            try:
                await fresh.get("/health")
            except httpx.TransportError:
                return
            await asyncio.sleep(0.02)
