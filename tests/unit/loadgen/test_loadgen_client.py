"""Whatever a server sends, a call has an end that says so, and only whole answers are done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from isthmus.loadgen import Endpoint, Record, Status
from isthmus.loadgen.client import stopwatch
from isthmus.workload import Call

pytestmark = pytest.mark.asyncio


def token(text: str = "x", finish_reason: str | None = None) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]})


def usage(**fields: object) -> str:
    return json.dumps({"choices": [], "usage": fields})


async def followed(*events: str) -> Record:
    """A call that is answered with these events."""
    body = "".join(f"data: {event}\n\n" for event in events)
    return await follow(Endpoint("http://server", "m"), httpx.Response(200, text=body))


async def follow(asked: Endpoint, answer: httpx.Response) -> Record:
    transport = httpx.MockTransport(lambda _: answer)
    record = Record(Call(0, 0.0, 1, 2))
    async with asked as endpoint:
        assert endpoint._client is not None
        await endpoint._client.aclose()
        endpoint._client = httpx.AsyncClient(transport=transport)
        await endpoint.follow(record, "prompt", stopwatch())
    return record


@pytest.mark.parametrize(
    "event",
    [
        "{",
        "[]",
        "null",
        "7",
        usage(tokens=3),
        usage(completion_tokens=None, prompt_tokens=1),
        usage(completion_tokens="many", prompt_tokens=1),
        json.dumps({"choices": ["x"]}),
        json.dumps({"choices": 3}),
        json.dumps({"usage": [1]}),
    ],
)
async def test_an_event_that_cannot_be_read_is_an_error_of_its_call(event: str) -> None:
    record = await followed(token(), event, token(), "[DONE]")
    assert record.status is Status.ERROR
    assert "cannot be read" in record.problem


async def test_an_answer_that_was_cut_short_is_not_done() -> None:
    record = await followed(token(), token())
    assert record.status is Status.ERROR
    assert "cut short" in record.problem


@pytest.mark.parametrize("end", ["[DONE]", token("", "length"), token("y", "stop")])
async def test_an_answer_that_says_that_it_is_whole_is_done(end: str) -> None:
    record = await followed(token(), token(), usage(completion_tokens=2, prompt_tokens=1), end)
    assert (record.status, record.problem) == (Status.DONE, "")
    assert (record.num_tokens, record.num_prompt_tokens) == (2, 1)


async def test_an_end_without_a_token_is_an_error() -> None:
    record = await followed(token("", "stop"), "[DONE]")
    assert record.status is Status.ERROR
    assert "without a token" in record.problem


async def test_an_answer_that_goes_on_for_ever_ends_with_the_calls_deadline() -> None:
    async def talk() -> AsyncIterator[bytes]:
        while True:
            yield f"data: {token()}\n\n".encode()
            await asyncio.sleep(0)

    asked = Endpoint("http://server", "m", deadline_s=0.2)
    record = await follow(asked, httpx.Response(200, content=talk()))
    assert (record.status, record.problem) == (Status.TIMEOUT, "no end in 0.2 s")
    assert record.first_s > 0, "what came until then is kept"
