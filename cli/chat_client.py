"""A conversation over the HTTP API: streams replies and remembers what was said."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from isthmus.common.errors import InstanceLostError, InternalError, IsthmusError

_DATA = "data: "
_DONE = "[DONE]"


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class ChatClient:
    """One conversation. ``options`` are further fields of every request (temperature, …)."""

    http: httpx.Client
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    """Of the last reply."""
    finish_reason: str = ""

    def stream_reply(self, text: str) -> Generator[str, None, None]:
        """Says ``text`` and yields the reply piece by piece.

        A reply that was broken off by the caller (by closing the iterator) is remembered as far as
        it went; after an error neither side of the exchange is. Raises IsthmusError.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        is_failed = True
        try:
            for piece in self._stream():
                pieces.append(piece)
                yield piece
            is_failed = False
        except GeneratorExit:
            is_failed = False
            raise
        except httpx.HTTPError as error:
            raise InstanceLostError(f"no answer from {self.http.base_url}: {error}") from error
        finally:
            if is_failed:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _stream(self) -> Iterator[str]:
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                raise refusal(reply.status_code, reply.read())
            for line in reply.iter_lines():
                if not line.startswith(_DATA) or line == _DATA + _DONE:
                    continue
                yield from self._text_of(orjson.loads(line.removeprefix(_DATA)))

    def _text_of(self, chunk: dict[str, Any]) -> Iterator[str]:
        if "error" in chunk:
            raise InternalError(str(chunk["error"].get("message", chunk["error"])))
        if usage := chunk.get("usage"):
            self.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"])
        for choice in chunk.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if content := choice["delta"].get("content"):
                yield content


def refusal(status: int, body: bytes) -> IsthmusError:
    """The error of an answer in OpenAI's shape, or its status when it has another."""
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = f"the gateway answered with status {status}"
    return InternalError(message, stage="chat")


def first_model(http: httpx.Client) -> str:
    """The name of the model that is served. Raises IsthmusError."""
    try:
        reply = http.get("/v1/models")
    except httpx.HTTPError as error:
        raise InstanceLostError(f"no answer from {http.base_url}: {error}") from error
    if reply.status_code != httpx.codes.OK:
        raise refusal(reply.status_code, reply.content)
    return str(reply.json()["data"][0]["id"])
