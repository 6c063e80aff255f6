"""Where the last turn of each conversation was served.

The prefix index knows what an instance holds once its KV events have told; a conversation's next
turn may come sooner, or its prefix may lie in a tier that the index does not see. So a turn that
names its session prefers the instances of the one before, as far as ``session_affinity_ms`` goes:
never against a target, never against a queue that is longer than that. Bounded: the sessions that
were served least recently are forgotten first. A session belongs to its tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from isthmus.common.ids import InstanceId
from isthmus.router.types import RouteQuery


@dataclass(frozen=True, slots=True)
class LastServed:
    """``prefill`` is None where the decode instance computed the prompt itself; ``worth_ms``: what
    it is worth to go to each of them again."""

    prefill: InstanceId | None
    decode: InstanceId
    worth_ms: float


class Sessions:
    def __init__(self, max_sessions: int, worth_ms: float) -> None:
        self._max_sessions = max_sessions
        self._worth_ms = worth_ms
        self._last: OrderedDict[tuple[str, str], LastServed] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def last(self, query: RouteQuery) -> LastServed | None:
        """None for a query without a session, and for a session's first turn."""
        return self._last.get((query.tenant, query.session)) if query.session else None

    def served(self, query: RouteQuery, prefill: InstanceId | None, decode: InstanceId) -> None:
        """``prefill`` None: by the decode instance itself."""
        if not query.session or not self._worth_ms:
            return
        key = query.tenant, query.session
        self._last[key] = LastServed(prefill, decode, self._worth_ms)
        self._last.move_to_end(key)
        if len(self._last) > self._max_sessions:
            self._last.popitem(last=False)
