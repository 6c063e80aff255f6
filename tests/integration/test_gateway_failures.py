"""What a client sees when an instance fails under its request: never silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from isthmus.common import metrics
from isthmus.common.config import ClusterConfig, GatewayConfig
from isthmus.common.errors import (
    CapacityError,
    InternalError,
    InvalidRequestError,
    OutOfBlocksError,
)
from isthmus.gateway.decider import Asker
from isthmus.gateway.router_client import ChoiceQuery, RouterClient
from isthmus.protos.v1 import common_pb2
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, running_gateway
from tests.support.poll import poll_until

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = "the one zeta 안 two"
NO_WAIT = ClusterConfig(gateway=GatewayConfig(instance_wait_ms=0))


@pytest_asyncio.fixture
async def fakes() -> list[FakeDecode]:
    return [FakeDecode("decode-0"), FakeDecode("decode-1")]


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, fakes: list[FakeDecode]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, fakes) as running:
        for fake in fakes:
            fake.script = lambda _: Script((*running.ids(TEXT), 2))
        yield running


def first_asked(fakes: list[FakeDecode]) -> tuple[FakeDecode, FakeDecode]:
    """The instance that has the request, and the other."""
    busy = next(fake for fake in fakes if fake.submitted)
    return busy, next(fake for fake in fakes if fake is not busy)


def retries(reason: str) -> float:
    return metrics.RETRIES.labels(reason=reason)._value.get()


def hold_at(gateway: RunningGateway, fakes: list[FakeDecode], position: int) -> asyncio.Event:
    """Every instance stops before this token, unless it is a resumed request."""
    gate = asyncio.Event()
    ids = (*gateway.ids(TEXT), 2)

    def script(request: common_pb2.Request) -> Script:
        is_retry = not request.request_id.endswith(".0")
        return Script(ids) if is_retry else Script(ids, gate=gate, gate_at=position)

    for fake in fakes:
        fake.script = script
    return gate


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_instance_that_dies_before_the_first_token_costs_only_time(
    gateway: RunningGateway, fakes: list[FakeDecode], stream: bool
) -> None:
    hold_at(gateway, fakes, 0)
    before = retries("retry")
    async with gateway.http() as client:
        body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await poll_until(lambda: any(fake.submitted for fake in fakes))
        busy, other = first_asked(fakes)
        await busy.kill()
        answer = await asking
    assert answer.status_code == 200
    assert answer.headers["x-isthmus-decode"] == other.instance_id
    assert text_of(answer.text, stream) == TEXT
    assert retries("retry") == before + 1
    assert other.requests[0].num_resumed_tokens == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_a_stream_whose_instance_dies_goes_on_elsewhere(
    gateway: RunningGateway, fakes: list[FakeDecode], num_choices: int
) -> None:
    hold_at(gateway, fakes, 3)
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            stream=True,
            logprobs=True,
            seed=7,
            n=num_choices,
            stop="never to be seen",
        )
        texts, tokens = [""] * num_choices, [0] * num_choices
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len(choice.logprobs.content or ()) if choice.logprobs else 0
            if all(texts) and all(fake._server for fake in fakes):
                busy, other = first_asked(fakes)
                await busy.kill()
    assert texts == [TEXT] * num_choices
    assert tokens == [len(gateway.ids(TEXT)) + 1] * num_choices
    for index, request in enumerate(sorted(other.requests, key=lambda item: item.request_id)):
        first = busy.requests[index]
        assert request.num_resumed_tokens >= 1
        num_prompt = len(first.token_ids)
        assert list(request.token_ids[:num_prompt]) == list(first.token_ids)
        delivered = list(request.token_ids[num_prompt:])
        assert delivered == list(gateway.ids(TEXT)[: request.num_resumed_tokens])
        assert request.sampling.seed == 7 + index
        assert not first.HasField("first_token_age_ms")
        assert 0 <= request.first_token_age_ms < 60_000
        assert request.HasField("first_token_age_ms")


@pytest.mark.asyncio
async def test_a_stream_may_be_configured_to_end_with_an_error(tmp_path: Path) -> None:
    fakes = [FakeDecode("decode-0"), FakeDecode("decode-1")]
    config = ClusterConfig(gateway=GatewayConfig(on_decode_loss="error"))
    async with running_gateway(tmp_path, fakes, config) as gateway:
        hold_at(gateway, fakes, 3)
        assert "instance_lost" in await broken_stream(gateway, fakes)


@pytest.mark.asyncio
async def test_with_nobody_left_a_stream_ends_with_an_error_event(tmp_path: Path) -> None:
    fakes = [FakeDecode("decode-0")]
    async with running_gateway(tmp_path, fakes, NO_WAIT) as gateway:
        hold_at(gateway, fakes, 3)
        events = await broken_stream(gateway, fakes)
        error = json.loads(events.strip().split("\n\n")[-2].removeprefix("data: "))["error"]
        assert error["code"] == "instance_lost"
        assert "decode-0" in error["message"]


async def broken_stream(gateway: RunningGateway, fakes: list[FakeDecode]) -> str:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True}
    received = ""
    async with (
        gateway.http() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        async for part in answer.aiter_text():
            received += part
            busy, _ = first_asked([*fakes, FakeDecode("none")])
            await busy.kill()
    assert received.endswith("data: [DONE]\n\n")
    return received


@pytest.mark.asyncio
async def test_with_nobody_left_a_whole_answer_is_a_502(tmp_path: Path) -> None:
    fakes = [FakeDecode("decode-0")]
    async with running_gateway(tmp_path, fakes, NO_WAIT) as gateway, gateway.openai() as client:
        hold_at(gateway, fakes, 3)
        asking = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=MESSAGES)
        )
        await poll_until(lambda: bool(fakes[0].submitted))
        await fakes[0].kill()
        with pytest.raises(openai.APIStatusError) as caught:
            await asking
        assert caught.value.status_code == 502
        assert caught.value.code == "instance_lost"


@pytest.mark.asyncio
async def test_an_instance_that_refuses_for_now_is_asked_no_second_time(
    gateway: RunningGateway, fakes: list[FakeDecode]
) -> None:
    full = OutOfBlocksError("full", stage="reserve", retry_after_ms=2500)
    fakes[0].script = fakes[1].script = lambda _: Script((3,), error=full)
    async with gateway.http() as client:
        body = {"model": "tiny", "prompt": "x"}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "out_of_blocks"
    assert answer.headers["retry-after"] == "3"
    assert [len(fake.submitted) for fake in fakes] == [1, 1]


@pytest.mark.asyncio
async def test_an_error_that_no_retry_can_help_is_told_at_once(
    gateway: RunningGateway, fakes: list[FakeDecode]
) -> None:
    for error, status in ((InvalidRequestError("no"), 400), (InternalError("oh"), 500)):
        fakes[0].script = fakes[1].script = lambda _, e=error: Script((3,), error=e)
        before = sum(len(fake.submitted) for fake in fakes)
        async with gateway.http() as client:
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.status_code == status
        assert sum(len(fake.submitted) for fake in fakes) == before + 1


@pytest.mark.asyncio
async def test_tokens_already_complete_need_no_resume(
    gateway: RunningGateway, fakes: list[FakeDecode]
) -> None:
    """The instance dies after the last token and before its word that the sequence has ended."""
    lost = OutOfBlocksError("gone")
    ids = (*gateway.ids(TEXT), 2)
    for fake in fakes:
        fake.script = lambda _: Script(ids, error=lost, error_at=len(ids))
    async with gateway.openai() as client:
        for extra, reason in (({"ignore_eos": True}, "length"), ({}, "stop")):
            answer = await client.completions.create(
                model="tiny", prompt="x", max_tokens=len(ids), extra_body=extra
            )
            assert answer.choices[0].finish_reason == reason
            assert answer.choices[0].text == TEXT
    assert sum(len(fake.submitted) for fake in fakes) == 2


@pytest.mark.asyncio
async def test_the_deadline_ends_a_request_with_its_stage(tmp_path: Path) -> None:
    """Of ever longer deadlines the first at which both requests have come so far."""
    body = {"model": "tiny", "messages": MESSAGES}
    for timeout_ms in (300, 3_000, 10_000):
        fake = FakeDecode()
        config = ClusterConfig(gateway=GatewayConfig(request_timeout_ms=timeout_ms))
        async with running_gateway(tmp_path, [fake], config) as gateway, gateway.http() as client:
            hold_at(gateway, [fake], 0)
            early = await client.post("/v1/chat/completions", json=body)
            hold_at(gateway, [fake], 2)
            late = await client.post("/v1/chat/completions", json=body | {"stream": True})
            if len(fake.submitted) < 2 or late.status_code != 200:
                continue
            assert early.status_code == 504
            assert "first_token" in early.json()["error"]["message"]
            assert "deadline_exceeded" in late.text
            assert "stage: decode" in late.text
            assert late.text.endswith("data: [DONE]\n\n")
            await poll_until(lambda fake=fake: len(fake.aborted) == 2)  # type: ignore[misc]
            return
    pytest.fail("no deadline was long enough")


@pytest.mark.asyncio
async def test_an_instance_that_leaves_the_cluster_fails_its_requests_at_once(
    tmp_path: Path,
) -> None:
    fake = FakeDecode()
    async with running_gateway(tmp_path, [fake], NO_WAIT) as gateway, gateway.http() as client:
        hold_at(gateway, [fake], 0)
        body = {"model": "tiny", "messages": MESSAGES}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await poll_until(lambda: bool(fake.submitted))
        gateway.gateway.decode_client.follow([])
        answer = await asking
        assert answer.status_code == 502


@pytest.mark.asyncio
async def test_a_restarted_instance_is_reached_again_without_being_asked(tmp_path: Path) -> None:
    fake = FakeDecode()
    async with running_gateway(tmp_path, [fake]) as gateway, gateway.http() as client:
        client_of_decode = gateway.gateway.decode_client
        await fake.kill()
        await poll_until(lambda: not client_of_decode.is_live(fake.info.instance_id))
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "not connected" in ready.text
        await fake.start()
        await poll_until(lambda: client_of_decode.is_live(fake.info.instance_id))
        assert (await client.get("/ready")).status_code == 200
        answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "hi"


def text_of(answer: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("d")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@pytest.mark.asyncio
async def test_no_place_for_a_second_choice_ends_the_request_and_is_no_fault(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first choice ends with its first token, which is when the second one is sent."""
    route = RouterClient.route

    def only_once(self: RouterClient, query: ChoiceQuery, asker: Asker, *, may_wait: bool) -> None:
        if "-1." in query.request_id:
            asker.on_refused(CapacityError("every place is taken", stage="route"))
        else:
            route(self, query, asker, may_wait=may_wait)

    monkeypatch.setattr(RouterClient, "route", only_once)
    body = {"model": "tiny", "prompt": "x", "n": 2, "stop": TEXT[:3]}
    with capture_logs() as lines:
        async with gateway.http() as client:
            answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("every place is taken")
    assert not [line for line in lines if line["log_level"] == "error"]
