"""A fault of the gateway's own: one traceback, one count, and an answer in the usual shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from isthmus.common import metrics
from isthmus.gateway.formats import ChatFormat
from isthmus.gateway.router_client import RouterClient
from tests.support.fake_decode import FakeDecode
from tests.support.gateway_server import RunningGateway, running_gateway

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SECRET = "what nobody foresaw"


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, [FakeDecode()]) as running:
        yield running


def boom(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError(SECRET)


def ended(outcome: str) -> float:
    labels = {"slo_class": "default", "tenant": "anonymous", "outcome": outcome}
    return metrics.REQUESTS.labels(**labels)._value.get()


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", ["plan", "answer", "stream"])
async def test_it_is_logged_once_counted_once_and_told_without_its_traceback(
    gateway: RunningGateway, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stage == "plan":
        monkeypatch.setattr(gateway.gateway.pipeline, "render", boom)
    else:
        monkeypatch.setattr(ChatFormat, "whole" if stage == "answer" else "frames", boom)
    before, before_ok = ended("error"), ended("good")
    body = BODY | {"stream": stage == "stream"}
    with capture_logs() as lines:
        async with gateway.http() as client:
            answer = await client.post(
                "/v1/chat/completions", json=body, headers={"x-request-id": "mine"}
            )
    assert answer.headers["x-request-id"] == "mine"
    if stage == "stream":
        assert answer.text.endswith("\n\ndata: [DONE]\n\n")
        content = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))
    else:
        assert answer.status_code == 500
        content = answer.json()
    assert content["error"] == {
        "message": "internal error (stage: gateway)",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
        "reason": "internal_error",
        "stage": "gateway",
    }
    assert (ended("error"), ended("good")) == (before + 1, before_ok)
    (line,) = [line for line in lines if line.get("exc_info")]
    assert SECRET in str(line["exc_info"])
    assert line["request_id"].startswith("mine")


@pytest.mark.asyncio
async def test_routes_without_an_exchange_tell_it_alike(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RouterClient, "max_model_len", boom)
    with capture_logs() as lines:
        async with gateway.http() as client:
            answer = await client.get("/v1/models", headers={"x-request-id": "mine"})
            assert (await client.get("/health")).status_code == 200
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] == "mine"
    assert sum(bool(line.get("exc_info")) for line in lines) == 1
