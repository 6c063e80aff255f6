"""Server-sent events as OpenAI frames them, and the response that streams an exchange.

Tokens that arrive while a slow client is being written to are merged: each turn of the loop sends
what there is, and writing waits for the connection. The watch on the connection runs beside it, so
a client that leaves is noticed at once, not at the next token. One that stays and reads nothing is
given up ``STALL_S`` after the deadline of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from isthmus.common.errors import CancelledError, DeadlineError, IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.tasks import tell_if_broken
from isthmus.gateway.error_response import error_body
from isthmus.gateway.event_frame import frame
from isthmus.gateway.exchange import Exchange
from isthmus.gateway.formats import AnswerFormat
from isthmus.gateway.unexpected import internal_error, log_unexpected
from isthmus.gateway.waiting import until_left

_log = get_logger("sse")
_tell_if_unwatched = tell_if_broken(_log, "a client is not watched any more")
DONE = b"data: [DONE]\n\n"
STALL_S = 5.0
RawHeaders = list[tuple[bytes, bytes]]
_STREAMED: RawHeaders = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


def stream_headers(headers: Mapping[str, str]) -> RawHeaders:
    """As they are sent before a stream. Names are in small letters."""
    own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return own + _STREAMED


class ClientWatch:
    """Until stopped, a connection that ends cancels the exchange. The body must have been read."""

    def __init__(self, receive: Receive, exchange: Exchange) -> None:
        self._task = asyncio.get_running_loop().create_task(_watch(receive, exchange))
        self._task.add_done_callback(_tell_if_unwatched)

    def stop(self) -> None:
        """Its task ends by itself in the next turn of the loop; nothing is left to wait for."""
        self._task.cancel()


async def _watch(receive: Receive, exchange: Exchange) -> None:
    await until_left(receive)
    exchange.cancel()


class EventStreamResponse(Response):
    """Streams an exchange that has something to say already; closes it, and the watch on its
    client, however that ends. It sends its events itself: the framework's own loop would wait for
    the client in a task more, and knows no end of its own.

    ``headers``: from ``stream_headers``, so that they can be made before there is anything to say.
    """

    def __init__(
        self,
        exchange: Exchange,
        answer: AnswerFormat,
        headers: RawHeaders,
        watch: ClientWatch,
        on_end: Callable[[], None],
    ) -> None:
        # The framework's own would only make headers, one by one, once the client waits for them.
        self.status_code, self.background, self.raw_headers = 200, None, headers
        self._exchange = exchange
        self._answer = answer
        self._watch = watch
        self._on_end = on_end

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 (ASGI's signature)
        receive: Receive,  # noqa: ARG002 (the watch reads it)
        send: Send,
    ) -> None:
        try:
            # Set at the deadline: until then the exchange's own timer watches over both.
            async with asyncio.timeout(None) as stall:
                loop = asyncio.get_running_loop()
                self._exchange.when_expired(lambda: stall.reschedule(loop.time() + STALL_S))
                await self._stream(send)
        except TimeoutError:
            error = DeadlineError("the client did not read the answer", stage="flush")
            self._exchange.break_off(error)
        finally:
            self._exchange.close()
            self._on_end()
            self._watch.stop()

    async def _stream(self, send: Send) -> None:
        """Every token passes the awaits that lead here: they are few on purpose."""
        exchange = self._exchange
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not exchange.is_done:
                await self._flush(send)
                await exchange.wait()
            await self._flush(send, is_last=True)
            # A connection writes at the end of the loop's turn: before the request is counted.
            await asyncio.sleep(0)
        except CancelledError:
            return  # nobody is there to be told
        except IsthmusError as error:
            await self._end(send, frame(error_body(error)))
        except Exception as error:  # noqa: BLE001 (the client has its status: tell it in an event)
            log_unexpected(error, exchange.plan.request_id)
            exchange.break_off(internal_error())
            await self._end(send, frame(error_body(internal_error())))

    async def _flush(self, send: Send, *, is_last: bool = False) -> None:
        frames: list[bytes] = []
        has_content = False
        for choice in self._exchange.take_changed():
            delta = choice.take()
            frames += self._answer.frames(choice, delta)
            has_content = has_content or delta.text != ""
        if is_last:
            if usage := self._answer.usage_chunk(self._exchange):
                frames.append(frame(usage))
            await self._end(send, b"".join(frames))
        elif frames:
            body = frames[0] if len(frames) == 1 else b"".join(frames)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if is_last or (has_content and not self._exchange.has_flushed):
            self._exchange.mark_flushed(has_content=has_content)

    async def _end(self, send: Send, last: bytes) -> None:
        await send({"type": "http.response.body", "body": last + DONE, "more_body": False})
