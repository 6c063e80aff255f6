"""``return_token_ids``: the ids behind the text, whatever became of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from isthmus.protos.v1 import common_pb2
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, running_gateway

pytestmark = pytest.mark.asyncio
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def fake() -> FakeDecode:
    return FakeDecode()


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, fake: FakeDecode) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, [fake]) as running:
        yield running


async def ask(gateway: RunningGateway, path: str, **body: Any) -> dict[str, Any]:
    """A streamed answer is put together as a client would: ids joined per choice."""
    async with gateway.http() as client:
        answer = await client.post(path, json={"model": "tiny", "return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"choices": choices}
    for line in answer.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        whole["usage"] = event.get("usage") or whole.get("usage")
        if "prompt_token_ids" in event:
            whole["prompt_token_ids"] = event["prompt_token_ids"]
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"token_ids": []})
            choice["token_ids"] += part["token_ids"]
            if "prompt_token_ids" in part:
                choice["prompt_token_ids"] = part["prompt_token_ids"]
    return whole


STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("how", [{}, STREAM])
async def test_chat_gives_ids_of_prompt_and_answer(
    gateway: RunningGateway, fake: FakeDecode, how: dict[str, Any]
) -> None:
    output = (*gateway.ids("the 안녕 😀 end"), 2)
    fake.script = lambda _: Script(output)
    answer = await ask(gateway, "/v1/chat/completions", messages=MESSAGES, **how)
    assert answer["choices"][0]["token_ids"] == list(output)
    assert answer["prompt_token_ids"] == list(fake.requests[0].token_ids)
    assert answer["usage"]["completion_tokens"] == len(output)


@pytest.mark.parametrize("how", [{}, STREAM])
async def test_every_choice_of_every_prompt_has_its_own(
    gateway: RunningGateway, fake: FakeDecode, how: dict[str, Any]
) -> None:
    outputs = [gateway.ids(text) for text in ("one", " two", " three", "the one")]

    def script(request: common_pb2.Request) -> Script:
        return Script(outputs[int(request.request_id.rpartition("-")[2].partition(".")[0])])

    fake.script = script
    prompts = [[5, 6, 7], [8, 9]]
    answer = await ask(gateway, "/v1/completions", prompt=prompts, n=2, **how)
    for index, output in enumerate(outputs):
        choice = answer["choices"][index]
        assert choice["token_ids"] == list(output)
        assert choice["prompt_token_ids"] == prompts[index // 2]


@pytest.mark.parametrize("how", [{}, STREAM])
@pytest.mark.parametrize("tokens_per_step", [1, 50])
async def test_ids_end_with_the_token_that_completed_a_stop_string(
    gateway: RunningGateway, fake: FakeDecode, how: dict[str, Any], tokens_per_step: int
) -> None:
    output = gateway.ids("one zeta eta theta two")
    fake.script = lambda _: Script(output, tokens_per_step=tokens_per_step)
    answer = await ask(gateway, "/v1/completions", prompt="x", stop=" zeta eta theta", **how)
    expected = list(gateway.ids("one zeta eta theta"))
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["completion_tokens"] == len(expected)


async def test_echo_alone_has_no_ids_of_its_own(gateway: RunningGateway, fake: FakeDecode) -> None:
    answer = await ask(gateway, "/v1/completions", prompt=[70, 71], echo=True, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["token_ids"] == []
    assert choice["prompt_token_ids"] == [70, 71]
    assert fake.requests[0].sampling.max_tokens == 1


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
async def test_who_does_not_ask_gets_none(gateway: RunningGateway, asked: dict[str, Any]) -> None:
    async with gateway.http() as client:
        body = {"model": "tiny", "prompt": "x", **asked}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert "token_ids" not in answer["choices"][0]
    assert "prompt_token_ids" not in answer["choices"][0]
