"""The HTTP server's own lines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

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
