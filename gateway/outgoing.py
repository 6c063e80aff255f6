"""What is to be sent on one stream to a decode instance, many requests to a message.

A write to a stream waits until the one before it has gone, which takes turns of the event loop.
What comes meanwhile goes together in the next message, so that a burst costs one write and not one
a request. Messages are filled in place: one that is given to another's constructor is copied.
"""

from __future__ import annotations

import asyncio
from collections import deque

from isthmus.common.ids import RequestId
from isthmus.common.types import Request, RouteDecision
from isthmus.protos.convert.decisions import decision_fields
from isthmus.protos.convert.requests import request_fields
from isthmus.protos.v1 import decode_pb2 as pb

MAX_TOKENS = 65_536
"""Of the prompts of one message that holds several: far below what a message may be large."""


class Outgoing:
    """One reader. Whatever is aborted was submitted in the same message or in one before."""

    def __init__(self) -> None:
        self._messages: deque[pb.GenerateRequest] = deque()
        self._num_tokens = 0  # of the last message's prompts
        self._has_some = asyncio.Event()

    def submit(self, request: Request, decision: RouteDecision) -> None:
        """Raises what the request's own fields are wrong with; nothing is to be sent then."""
        num_tokens = len(request.token_ids)
        fields = {"request": request_fields(request), "decision": decision_fields(decision)}
        if not self._messages or self._num_tokens + num_tokens > MAX_TOKENS:
            message, self._num_tokens = pb.GenerateRequest(submits=[fields]), 0
            self._messages.append(message)
        else:
            submits = self._messages[-1].submits
            num_before = len(submits)
            try:
                submits.add(**fields)
            except BaseException:
                del submits[num_before:]
                raise
        self._num_tokens += num_tokens
        self._has_some.set()

    def abort(self, request_id: RequestId, reason: str) -> None:
        if not self._messages:
            self._messages.append(pb.GenerateRequest())
            self._num_tokens = 0
        self._messages[-1].aborts.add(request_id=request_id, reason=reason)
        self._has_some.set()

    async def take(self) -> pb.GenerateRequest:
        """The next message, as soon as there is anything in it."""
        await self._has_some.wait()
        message = self._messages.popleft()
        if not self._messages:
            self._has_some.clear()
        return message
