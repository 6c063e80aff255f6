"""Named life-time events of one request: the single source of metrics, logs and traces.

::

    ARRIVED ─ TOKENISED ─ ROUTED ─ ADMITTED ─ SCHEDULED ─ PREFILLED ─ FIRST_FLUSH
              tokenise    route    queue₁     queue₂      prefill     first flush
              PREFILLED ─ KV_READY ─ SECOND_TOKEN ─ LAST_TOKEN ─ FINISHED
                 transfer   decode wait      decode     last flush

A prompt that is computed again after an attempt came to nothing has the events of the attempt that
counted; the time of the one before is part of ``admit``.

Each event is unix nanoseconds, recorded in the process where it happens and carried to the gateway
with the stream; on several machines a stage between two machines is as exact as their clocks.

TTFT is ARRIVED → FIRST_FLUSH. A streamed answer has FIRST_FLUSH when its first content is handed to
the client's connection. An answer that is sent whole has it when its first output token reaches the
gateway: its one write is the end, and would tell nothing of the first token.

FINISHED is the request's, LAST_TOKEN a sequence's: of several sequences all but the last have a
`last flush` that waits for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

NS_PER_S = 1_000_000_000


class Event(Enum):
    ARRIVED = "arrived"  # gateway: request body read
    TOKENISED = "tokenised"  # gateway
    ROUTED = "routed"  # gateway: decision in hand
    ADMITTED = "admitted"  # decode: blocks reserved
    PREFILL_QUEUED = "prefill_queued"  # where the prompt is computed: entered the engine
    SCHEDULED = "scheduled"  # first step that runs the sequence begins
    PREFILLED = "prefilled"  # the step that sampled the first token ended
    KV_SENT = "kv_sent"  # prefill: last write confirmed
    KV_READY = "kv_ready"  # decode: every chunk has arrived
    FIRST_TOKEN = "first_token"  # decode: handed to the gateway's stream
    FIRST_FLUSH = "first_flush"  # gateway: first content written; not streamed: first token came
    SECOND_TOKEN = "second_token"  # decode: first token of its own
    LAST_TOKEN = "last_token"  # gateway: the end of the sequence has come
    FINISHED = "finished"  # gateway: last content written

    # Events are looked up dozens of times a request, and an enum's own hash is computed in Python.
    __hash__ = object.__hash__


class Timeline:
    """Event times of one request. The first mark of an event wins."""

    __slots__ = ("_at_ns",)

    def __init__(self, at_ns: Mapping[Event, int] | None = None) -> None:
        self._at_ns: dict[Event, int] = dict(at_ns or {})

    def mark(self, event: Event, at_ns: int) -> None:
        self._at_ns.setdefault(event, at_ns)

    def forget(self, event: Event) -> None:
        """An attempt came to nothing: the event counts when it happens again."""
        self._at_ns.pop(event, None)

    def merge(self, other: Timeline) -> None:
        known = self._at_ns
        # In this order of events, and what is known wins: all of it without a loop of Python's.
        self._at_ns = known | other._at_ns | known if known else dict(other._at_ns)

    def at_ns(self, event: Event) -> int | None:
        return self._at_ns.get(event)

    def seconds(self, start: Event, end: Event) -> float | None:
        """Seconds from ``start`` to ``end``, never below 0; None when either did not happen."""
        start_ns, end_ns = self._at_ns.get(start), self._at_ns.get(end)
        if start_ns is None or end_ns is None:
            return None
        return max(0, end_ns - start_ns) / NS_PER_S

    def items(self) -> list[tuple[Event, int]]:
        return sorted(self._at_ns.items(), key=lambda item: item[1])


# Stage → (begin, end); the parts of TTFT first, in order.
STAGES: dict[str, tuple[Event, Event]] = {
    "tokenise": (Event.ARRIVED, Event.TOKENISED),
    "route": (Event.TOKENISED, Event.ROUTED),
    "admit": (Event.ROUTED, Event.ADMITTED),
    "queue": (Event.ADMITTED, Event.SCHEDULED),
    "prefill": (Event.SCHEDULED, Event.PREFILLED),
    "first_flush": (Event.PREFILLED, Event.FIRST_FLUSH),
    "transfer": (Event.PREFILLED, Event.KV_READY),
    "decode_wait": (Event.KV_READY, Event.SECOND_TOKEN),
    "decode": (Event.SECOND_TOKEN, Event.LAST_TOKEN),
    "last_flush": (Event.LAST_TOKEN, Event.FINISHED),
}
SPANS: dict[str, tuple[Event, Event]] = {
    **STAGES,
    "ttft": (Event.ARRIVED, Event.FIRST_FLUSH),
    "e2e": (Event.ARRIVED, Event.FINISHED),
}


def spans_of(timeline: Timeline) -> dict[str, float]:
    """Seconds of every span whose ends are both known."""
    at_ns, spans = timeline._at_ns, dict[str, float]()
    for name, (begin, end) in SPANS.items():
        if begin in at_ns and end in at_ns:
            spans[name] = max(0, at_ns[end] - at_ns[begin]) / NS_PER_S
    return spans
