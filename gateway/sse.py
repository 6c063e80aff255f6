"""Server-sent events as OpenAI frames them, and the response that streams an exchange.

Tokens that arrive while a slow client is being written to are merged: each turn of the loop sends
what there is, and writing waits for the connection. The watch on the connection runs beside it, so
a client that leaves is noticed at once, not at the next token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from isthmus.common.errors import CancelledError, IsthmusError
from isthmus.gateway.error_response import error_body
from isthmus.gateway.exchange import Exchange
from isthmus.gateway.formats import AnswerFormat
from isthmus.gateway.unexpected import internal_error, log_unexpected

DONE = b"data: [DONE]\n\n"
# Line breaks to Unicode but not to SSE. Clients that split by the former would cut an event in two.
_FOREIGN_BREAKS = {mark.encode(): b"\\u%04x" % ord(mark) for mark in "\x85\u2028\u2029"}


def frame(payload: Mapping[str, Any]) -> bytes:
    data = orjson.dumps(payload)
    if not data.isascii():
        for mark, escaped in _FOREIGN_BREAKS.items():
            data = data.replace(mark, escaped)
    return b"data: " + data + b"\n\n"


@asynccontextmanager
async def cancel_when_client_leaves(receive: Receive, exchange: Exchange) -> AsyncIterator[None]:
    """While inside, a closed connection cancels the exchange. The body must have been read."""
    watch = asyncio.get_running_loop().create_task(_watch(receive, exchange))
    try:
        yield
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _watch(receive: Receive, exchange: Exchange) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            exchange.cancel()
            return


class EventStreamResponse(Response):
    """Streams an exchange that has something to say already; closes it however that ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        answer: AnswerFormat,
        headers: Mapping[str, str],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(
            headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._exchange = exchange
        self._answer = answer
        self._on_end = on_end

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 (ASGI's signature)
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            async with cancel_when_client_leaves(receive, self._exchange):
                await self._stream(send)
        except Exception as error:  # noqa: BLE001 (the client has its status: tell it in an event)
            log_unexpected(error, self._exchange.plan.request_id)
            self._exchange.break_off(internal_error())
            await self._end(send, frame(error_body(internal_error())))
        finally:
            self._exchange.close()
            self._on_end()

    async def _stream(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)}
        )
        exchange = self._exchange
        while not exchange.is_done:
            await self._flush(send)
            try:
                await exchange.wait()
            except CancelledError:
                return
            except IsthmusError as error:
                await self._end(send, frame(error_body(error)))
                return
        await self._flush(send, is_last=True)

    async def _flush(self, send: Send, *, is_last: bool = False) -> None:
        frames: list[bytes] = []
        has_content = False
        for choice, delta in self._exchange.take():
            frames += [frame(chunk) for chunk in self._answer.chunks(choice, delta)]
            has_content = has_content or bool(delta.text)
        if is_last:
            if usage := self._answer.usage_chunk(self._exchange):
                frames.append(frame(usage))
            await self._end(send, b"".join(frames))
        elif frames:
            await self._send(send, b"".join(frames), more=True)
        self._exchange.mark_flushed(has_content=has_content)

    async def _end(self, send: Send, last: bytes) -> None:
        await self._send(send, last + DONE, more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
