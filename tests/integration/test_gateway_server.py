"""The HTTP server's own lines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from isthmus.gateway.routes.completions import POSTS
from tests.support.fake_decode import FakeDecode
from tests.support.gateway_server import running_gateway


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
