"""Nobody can serve for a while: requests wait, bounded, and go on when an instance is ready."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.common import metrics
from isthmus.common.config import ClusterConfig, GatewayConfig
from isthmus.common.errors import DrainingError, OutOfBlocksError
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, running_gateway
from tests.support.poll import poll_until

TEXT = "the one zeta two"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "x"}
SHORT_WAIT = ClusterConfig(gateway=GatewayConfig(instance_wait_ms=150))


def num_held() -> float:
    return metrics.REQUESTS_HELD._value.get()


def num_inflight() -> float:
    return metrics.REQUESTS_INFLIGHT._value.get()


def ask(client: httpx.AsyncClient, **extra: object) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/v1/completions", json=BODY | extra))


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def restart(gateway: RunningGateway, fake: FakeDecode) -> None:
    fake.epoch += 1
    fake.script = lambda _: Script((*gateway.ids(TEXT), 2))
    await fake.start()
    await gateway.join(fake)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("position", [0, 2])
async def test_the_only_instance_may_restart_under_a_request(
    tmp_path: Path, stream: bool, position: int
) -> None:
    fake = FakeDecode()
    async with running_gateway(tmp_path, [fake]) as gateway, gateway.http() as client:
        script = Script((*gateway.ids(TEXT), 2), gate=asyncio.Event(), gate_at=position)
        fake.script = lambda _: script
        asking = ask(client, stream=stream, n=2)
        decode_client = gateway.gateway.decode_client
        sinks = decode_client._streams[fake.info.instance_id]._sinks
        num_sent = 2 if position else 1
        await poll_until(
            lambda: [c.num_output_tokens for c in sinks.values()] == [position] * num_sent
        )
        await fake.kill()
        await poll_until(lambda: num_held() == num_sent)
        assert gateway.gateway.limiter.num_inflight == 1
        new = ask(client)
        await poll_until(lambda: num_held() == num_sent + 1)
        assert num_inflight() == 2
        assert not asking.done()
        await restart(gateway, fake)
        answer = await asking
        if stream:
            assert answer.text.count('"finish_reason":"stop"') == 2
            assert "error" not in answer.text
        else:
            assert [choice["text"] for choice in answer.json()["choices"]] == [TEXT] * 2
        assert text_of(await new) == TEXT
        assert {request.num_resumed_tokens for request in fake.requests[num_sent:]} == {0, position}
    assert num_held() == num_inflight() == 0


@pytest.mark.asyncio
async def test_a_request_waits_for_the_first_instance(tmp_path: Path) -> None:
    """And is planned then: its length is what the instance allows, not a guess."""
    fake = FakeDecode(max_model_len=100)
    async with running_gateway(tmp_path) as gateway, gateway.http() as client:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat))
        await poll_until(lambda: num_held() == 1)
        unknown = await client.post("/v1/completions", json=BODY | {"model": "other"})
        assert unknown.status_code == 404  # no wait helps this one
        await fake.start()
        await gateway.join(fake)
        assert (await asking).status_code == 200
        (request,) = fake.requests
        assert request.sampling.max_tokens == 100 - len(request.token_ids)
        gateway.gateway.decode_client.follow([])
        await fake.kill()


@pytest.mark.asyncio
async def test_a_draining_instance_hands_over_to_its_successor(tmp_path: Path) -> None:
    old, new = FakeDecode("decode-0"), FakeDecode("decode-1")
    old.script = lambda _: Script((3,), error=DrainingError("draining", stage="submit"))
    async with running_gateway(tmp_path, [old]) as gateway, gateway.http() as client:
        asking = ask(client)
        await poll_until(lambda: len(old.submitted) == 1)
        await new.start()
        await gateway.join(new)
        assert (await asking).headers["x-isthmus-decode"] == "decode-1"
        gateway.gateway.decode_client.follow([])
        await new.kill()


@pytest.mark.asyncio
@pytest.mark.parametrize("is_submitted", [False, True])
async def test_the_wait_ends_with_503_and_a_time_to_come_back(
    tmp_path: Path, is_submitted: bool
) -> None:
    fake = FakeDecode()
    async with running_gateway(tmp_path, [fake], SHORT_WAIT) as gateway, gateway.http() as client:
        fake.script = lambda _: Script((3,), gate=asyncio.Event())
        if is_submitted:
            asking = ask(client)
            await poll_until(lambda: len(fake.submitted) == 1)
            await fake.kill()
        else:
            await fake.kill()
            name = fake.info.instance_id
            await poll_until(lambda: gateway.gateway.decode_client.is_broken(name))
            asking = ask(client)
        answer = await asking
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert error["code"] == "no_instance"
    assert error["reason"] == "out_of_reach"
    assert "became ready within 0.15 s" in error["message"]
    assert ("decode-0" in error["message"]) == is_submitted
    assert num_held() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("is_submitted", [False, True])
async def test_the_wait_ends_with_the_client(tmp_path: Path, is_submitted: bool) -> None:
    fake = FakeDecode()
    cancels = metrics.CANCELS.labels(stage="route")
    before = cancels._value.get()
    async with running_gateway(tmp_path, [fake]) as gateway, gateway.http() as client:
        fake.script = lambda _: Script((3,), gate=asyncio.Event())
        if not is_submitted:
            await fake.kill()
            name = fake.info.instance_id
            await poll_until(lambda: gateway.gateway.decode_client.is_broken(name))
        asking = ask(client)
        if is_submitted:
            await poll_until(lambda: len(fake.submitted) == 1)
            await fake.kill()
        await poll_until(lambda: num_held() == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await poll_until(lambda: num_held() == 0)
        await poll_until(lambda: gateway.gateway.limiter.num_inflight == 0)
        assert cancels._value.get() == before + 1


@pytest.mark.asyncio
async def test_the_wait_ends_with_the_deadline(tmp_path: Path) -> None:
    config = ClusterConfig(gateway=GatewayConfig(request_timeout_ms=300))
    fake = FakeDecode()
    async with running_gateway(tmp_path, [fake], config) as gateway, gateway.http() as client:
        fake.script = lambda _: Script((3,), gate=asyncio.Event())
        asking = ask(client)
        await poll_until(lambda: len(fake.submitted) == 1)
        await fake.kill()
        answer = await asking
    assert answer.status_code == 504
    assert num_held() == 0


@pytest.mark.asyncio
async def test_nobody_waits_for_an_instance_that_is_well_but_full(tmp_path: Path) -> None:
    fake = FakeDecode(script=lambda _: Script((3,), error=OutOfBlocksError("full")))
    async with running_gateway(tmp_path, [fake]) as gateway, gateway.http() as client:
        answer = await asyncio.wait_for(ask(client), 5)
        assert answer.json()["error"]["code"] == "out_of_blocks"
    assert len(fake.submitted) == 1


@pytest.mark.asyncio
async def test_a_request_that_kills_its_instance_is_tried_twice(tmp_path: Path) -> None:
    fake = FakeDecode()
    async with running_gateway(tmp_path, [fake]) as gateway, gateway.http() as client:
        fake.script = lambda _: Script((3,), gate=asyncio.Event())
        asking = ask(client)
        for number in (1, 2):
            await poll_until(lambda n=number: len(fake.submitted) == n)
            await fake.kill()
            fake.epoch += 1
            await fake.start()
            await gateway.join(fake)
        answer = await asking
        assert answer.json()["error"]["code"] == "instance_lost"
        assert len(fake.submitted) == 2
