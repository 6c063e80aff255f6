"""What the client of one request is told, and what of it has gone out already.

::

    start ──▶ deliver … ──▶ finish          fail, at any point, in place of what would follow

Prompts that are computed again, elsewhere or here, go on with the same answer: it starts once, and
its tokens are those of all attempts. Whether the request may end at all is for its state machine to
say; nothing here knows where the tokens come from.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.common.clock import Clock
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import InstanceId
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import FinishReason, LocalPrefillReason, Request, Usage
from isthmus.decode_worker.events import Failed, Finished, Outbox, Started, TokenDelta


class Answer:
    """The fields without underscore are kept by whoever serves the request; the events tell them
    as they are by then."""

    def __init__(self, request: Request, outbox: Outbox, clock: Clock) -> None:
        self.timeline = Timeline()
        self.local_reason = LocalPrefillReason.NONE
        self.transferred_bytes = 0
        self.failed_prefills: list[InstanceId] = []
        self._request_id = request.request_id
        self._num_prompt_tokens = request.num_prompt_tokens
        self._num_resumed_tokens = request.num_resumed_tokens
        self._outbox = outbox
        self._clock = clock
        self._delivered: list[int] = []
        self._num_cached_tokens: int | None = None

    @property
    def delivered(self) -> tuple[int, ...]:
        return tuple(self._delivered)

    @property
    def last_token_id(self) -> int:
        return self._delivered[-1]

    def start(self, num_cached_tokens: int) -> None:
        """Only the first call counts."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = min(num_cached_tokens, self._num_prompt_tokens)
            self._outbox.put(
                Started(self._request_id, self._num_cached_tokens, tuple(self.failed_prefills))
            )

    def deliver(self, delta: TokenDelta) -> None:
        """The first two deltas carry the timeline: the gateway may end the request any time now."""
        has_news = self.timeline.at_ns(Event.SECOND_TOKEN) is None
        if self._delivered:
            self.timeline.mark(Event.SECOND_TOKEN, self._clock.now_ns())
        self.timeline.mark(Event.FIRST_TOKEN, self._clock.now_ns())
        self._delivered.extend(delta.token_ids)
        self._outbox.put(replace(delta, timeline=self.timeline) if has_news else delta)

    def finish(self, reason: FinishReason, stop_token_id: int | None) -> None:
        self._outbox.put(
            Finished(
                self._request_id,
                reason,
                stop_token_id,
                Usage(
                    num_prompt_tokens=self._num_prompt_tokens,
                    num_output_tokens=self._num_resumed_tokens + len(self._delivered),
                    num_cached_tokens=self._num_cached_tokens or 0,
                ),
                self.timeline,
                self.local_reason,
                self.transferred_bytes,
                tuple(self.failed_prefills),
            )
        )

    def fail(self, error: IsthmusError) -> None:
        self._outbox.put(Failed(self._request_id, error, error.instance_id))
