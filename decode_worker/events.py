"""What a decode instance tells a gateway about the requests of one stream, and where it waits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.timeline import Timeline
from isthmus.common.types import FinishReason, LocalPrefillReason, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Started:
    request_id: RequestId
    num_cached_tokens: int
    failed_prefills: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: RequestId
    reason: FinishReason
    stop_token_id: int | None
    usage: Usage
    timeline: Timeline
    local_reason: LocalPrefillReason
    transferred_bytes: int
    failed_prefills: tuple[InstanceId, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: RequestId
    error: IsthmusError
    failed_instance: str = ""


GenerationEvent = Started | TokenDelta | Finished | Failed


class Outbox:
    """Events of one stream; what gathers while it cannot be written goes out as one message."""

    def __init__(self) -> None:
        self._events: list[GenerationEvent] = []
        self._wakeup = asyncio.Event()
        self._is_closed = False

    def put(self, event: GenerationEvent) -> None:
        self._events.append(event)
        self._wakeup.set()

    def close(self) -> None:
        """Nothing follows: ``take`` gives what is left and then an empty list."""
        self._is_closed = True
        self._wakeup.set()

    async def take(self) -> list[GenerationEvent]:
        """Everything since the last call, at least one event; empty once closed."""
        while not self._events and not self._is_closed:
            self._wakeup.clear()
            await self._wakeup.wait()
        events, self._events = self._events, []
        return events
