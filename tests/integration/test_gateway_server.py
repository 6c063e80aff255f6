"""The HTTP server's own lines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from isthmus.gateway.routes.completions import POSTS
from tests.support.fake_decode import FakeDecode
from tests.support.gateway_server import RunningGateway, running_gateway


@pytest.mark.asyncio
async def test_broken_http_is_said_in_our_format_and_not_each_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_gateway(tmp_path) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with capture_logs() as lines:
            for _ in range(20):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"this is no http\r\n\r\n")
                assert b" 400 " in await reader.readline()
                writer.close()
                await writer.wait_closed()
    said = [line for line in lines if line["component"] == "http"]
    assert len(said) == 1
    assert "Invalid HTTP request" in said[0]["event"]
    assert "Invalid HTTP" not in capfd.readouterr().err


@pytest.mark.asyncio
async def test_the_short_way_to_generation_is_for_posts_to_its_paths_only(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [FakeDecode()]) as gateway, gateway.http() as client:
        assert set(POSTS) < set((await client.get("/openapi.json")).json()["paths"])
        for path in POSTS:
            refused = await client.get(path)
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
            assert (await client.post(f"{path}/x")).status_code == 404
            wrong = await client.post(path, content=b"{", headers={"x-request-id": "mine"})
            assert (wrong.status_code, wrong.headers["x-request-id"]) == (400, "mine")
            assert wrong.json()["error"]["type"] == "invalid_request_error"
        body = {"model": "tiny", "prompt": "x"}
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0][
            "text"
        ] == "hi"


async def raw_answer(gateway: RunningGateway, version: str, *, is_streamed: bool) -> bytes:
    """To a request that arrives in two pieces, until the connection ends."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": is_streamed}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\ncontent-length: {len(body)}\r\n"
    head += "host: x\r\nconnection: close\r\n\r\n"
    whole = head.encode() + body
    writer.write(whole[:30])
    await writer.drain()
    writer.write(whole[30:])
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.asyncio
async def test_a_stream_to_a_client_of_http_1_0_ends_with_its_connection(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, [FakeDecode()]) as gateway:
        head, _, body = (await raw_answer(gateway, "1.0", is_streamed=True)).partition(b"\r\n\r\n")
        assert b" 200 " in head
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        events = body.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
        newer = await raw_answer(gateway, "1.1", is_streamed=True)
        assert b"transfer-encoding: chunked" in newer
        whole = await raw_answer(gateway, "1.0", is_streamed=False)
        assert json.loads(whole.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "hi"
