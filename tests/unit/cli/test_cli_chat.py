from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from isthmus.cli.chat_client import ChatClient, first_model
from isthmus.common.errors import InstanceLostError, InternalError

Answer = Callable[[httpx.Request], httpx.Response]


def chunk(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def piece(text: str | None, finish_reason: str | None = None) -> str:
    choice = {"delta": {"content": text}, "finish_reason": finish_reason}
    return chunk(choices=[choice])


def client_of(answer: Answer) -> ChatClient:
    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://gateway")
    return ChatClient(http, "m", {"seed": 3})


def test_reply_is_streamed_and_remembered() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        text = piece(None) + piece("Hel") + piece("lo", "stop") + chunk(choices=[], usage=usage)
        return httpx.Response(200, text=text + ": ping\n\ndata: [DONE]\n\n")

    client = client_of(answer)
    assert list(client.stream_reply("Hi")) == ["Hel", "lo"]
    assert list(client.stream_reply("More")) == ["Hel", "lo"]
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert bodies[1]["messages"][1]["content"] == "Hello"
    assert bodies[0]["seed"] == 3
    assert (client.usage.prompt_tokens, client.usage.completion_tokens) == (5, 2)
    assert client.finish_reason == "stop"


def test_refusal_is_told_and_forgotten() -> None:
    body = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    client = client_of(lambda _: httpx.Response(400, json=body))
    with pytest.raises(InternalError, match="too long"):
        list(client.stream_reply("x"))
    assert client.messages == []


def test_error_in_the_middle_of_a_stream_is_told() -> None:
    text = piece("Hel") + chunk(error={"message": "decode-0 is lost"})
    client = client_of(lambda _: httpx.Response(200, text=text))
    reply = client.stream_reply("x")
    assert next(reply) == "Hel"
    with pytest.raises(InternalError, match="decode-0 is lost"):
        next(reply)
    assert client.messages == []


def test_reply_that_is_broken_off_is_kept_as_far_as_it_went() -> None:
    client = client_of(lambda _: httpx.Response(200, text=piece("Hel") + piece("lo")))
    reply = client.stream_reply("x")
    assert next(reply) == "Hel"
    reply.close()
    assert client.messages[-1] == {"role": "assistant", "content": "Hel"}


def test_gateway_that_is_gone_is_one_sentence() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    client = client_of(refuse)
    with pytest.raises(InstanceLostError, match="no answer from http://gateway"):
        list(client.stream_reply("x"))
    with pytest.raises(InstanceLostError, match="no answer"):
        first_model(client.http)


def test_answer_that_is_no_json_still_has_a_reason() -> None:
    client = client_of(lambda _: httpx.Response(502, text="bad gateway"))
    with pytest.raises(InternalError, match="status 502"):
        list(client.stream_reply("x"))


def test_first_model_is_the_one_that_is_served() -> None:
    client = client_of(lambda _: httpx.Response(200, json={"data": [{"id": "smol"}]}))
    assert first_model(client.http) == "smol"
