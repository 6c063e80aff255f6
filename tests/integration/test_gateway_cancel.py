"""A client that leaves is noticed at every stage, and nothing of its request stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_MS, SystemClock
from isthmus.common.timeline import Timeline
from isthmus.common.types import SamplingParams
from isthmus.gateway import sse
from isthmus.gateway.exchange import Exchange
from isthmus.gateway.formats import CompletionFormat
from isthmus.gateway.plan import GenerationPlan, PreparedPrompt
from isthmus.gateway.sse import ClientWatch, EventStreamResponse
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, running_gateway
from tests.support.poll import poll_until

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def fake() -> FakeDecode:
    return FakeDecode()


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, fake: FakeDecode) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, [fake]) as running:
        yield running


def cancels(stage: str) -> float:
    return metrics.CANCELS.labels(stage=stage)._value.get()


def ended(outcome: str) -> float:
    labels = {"slo_class": "default", "tenant": "anonymous", "outcome": outcome}
    return metrics.REQUESTS.labels(**labels)._value.get()


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("position", "stage"), [(0, "first_token"), (2, "decode")])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_leaving_aborts_on_the_instance_and_is_counted(
    gateway: RunningGateway,
    fake: FakeDecode,
    stream: bool,
    position: int,
    stage: str,
    num_choices: int,
) -> None:
    gate = asyncio.Event()
    fake.script = lambda _: Script(gateway.ids("the one two"), gate=gate, gate_at=position)
    before, before_ended = cancels(stage), ended("cancelled")
    body = {"model": "tiny", "messages": MESSAGES, "stream": stream, "n": num_choices}
    async with gateway.http() as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        num_expected = num_choices if position else 1
        await poll_until(lambda: len(fake.submitted) == num_expected)
        decode_client = gateway.gateway.decode_client
        if position:
            sinks = decode_client._streams[fake.info.instance_id]._sinks
            await poll_until(lambda: all(c.num_output_tokens == position for c in sinks.values()))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await poll_until(lambda: len(fake.aborted) == num_expected)
    assert set(fake.aborted) == {request.request_id for request in fake.requests}
    await poll_until(lambda: ended("cancelled") == before_ended + 1)
    assert cancels(stage) == before + 1
    assert decode_client.num_requests() == 0


@pytest.mark.asyncio
async def test_leaving_while_sending_the_body_is_no_error(gateway: RunningGateway) -> None:
    before = cancels("receive")

    async def half() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with gateway.http() as client:
        asking = asyncio.create_task(client.post("/v1/completions", content=half()))
        await poll_until(lambda: gateway.gateway.limiter.num_inflight == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await poll_until(lambda: cancels("receive") == before + 1)


@pytest.mark.asyncio
async def test_a_stop_string_aborts_on_the_instance_but_is_no_cancel(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    fake.script = lambda _: Script(gateway.ids("the one two"), gate=asyncio.Event(), gate_at=2)
    before = ended("cancelled")
    async with gateway.http() as client:
        body = {"model": "tiny", "prompt": "x", "stop": " one"}
        answer = await client.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == "the"
    await poll_until(lambda: len(fake.aborted) == 1)
    assert ended("cancelled") == before


@pytest.mark.asyncio
async def test_many_cancels_leave_the_gateway_as_it_was(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    gate = asyncio.Event()
    fake.script = lambda _: Script(gateway.ids("the one two"), gate=gate, gate_at=1)
    async with httpx.AsyncClient(base_url=gateway.url, limits=httpx.Limits(), timeout=60) as client:
        body = {"model": "tiny", "messages": MESSAGES, "stream": True}
        asking = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(40)
        ]
        await poll_until(lambda: len(fake.submitted) == 40)
        for task in asking[::2]:
            task.cancel()
        await poll_until(lambda: len(fake.aborted) == 20)
        gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
    finished = [answer for answer in answers if isinstance(answer, httpx.Response)]
    assert len(finished) == 20
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in finished)


def started_exchange(
    gateway: RunningGateway, max_tokens: int, timeout_ms: int = 10_000
) -> Exchange:
    now_ns = SystemClock().now_ns()
    plan = GenerationPlan(
        request_id="slow",
        model="tiny",
        prompts=(PreparedPrompt("x", (5,), (), max_tokens),),
        num_choices=1,
        sampling=SamplingParams(),
        stop_strings=(),
        arrival_ns=now_ns,
        deadline_ns=now_ns + timeout_ms * NS_PER_MS,
    )
    exchange = Exchange(plan, gateway.gateway.services, Timeline())
    exchange.start()
    return exchange


async def never() -> Any:
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_tokens_that_arrive_while_a_slow_client_is_written_to_are_merged(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    ids = gateway.ids("the one two the one two")
    gate = asyncio.Event()
    fake.script = lambda _: Script(ids, gate=gate, gate_at=1)
    exchange = started_exchange(gateway, len(ids))
    await exchange.wait()
    answer = CompletionFormat("slow", "tiny", 0, gateway.tokenizer, usage=False, token_ids=False)
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            gate.set()
            await poll_until(lambda: exchange.is_done)

    watch = ClientWatch(never, exchange)
    await EventStreamResponse(exchange, answer, [], watch, lambda: None)({}, never, send)
    assert len(bodies) == 2
    assert bodies[1].count(b'"text"') == 1
    assert bodies[1].endswith(b"data: [DONE]\n\n")


@pytest.mark.asyncio
@pytest.mark.parametrize("is_complete", [False, True])
async def test_a_client_that_reads_nothing_is_given_up_after_the_deadline(
    gateway: RunningGateway, fake: FakeDecode, is_complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever opens streams and leaves them alone holds all the places there are."""
    monkeypatch.setattr(sse, "STALL_S", 0.01)
    ids = gateway.ids("the one two")
    fake.script = lambda _: Script(ids, gate=None if is_complete else asyncio.Event(), gate_at=1)
    exchange = started_exchange(gateway, len(ids), timeout_ms=100)
    await exchange.wait()
    if is_complete:
        await poll_until(lambda: exchange.is_done)
    before = ended("error")
    answer = CompletionFormat("slow", "tiny", 0, gateway.tokenizer, usage=False, token_ids=False)
    freed: list[bool] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never()

    watch = ClientWatch(never, exchange)
    response = EventStreamResponse(exchange, answer, [], watch, lambda: freed.append(True))
    await asyncio.wait_for(response({}, never, send), 10)
    assert freed == [True]
    assert ended("error") == before + 1
    assert gateway.gateway.decode_client.num_requests() == 0
