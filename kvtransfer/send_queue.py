"""Writes that wait for one link, and whose turn it is. No I/O: time comes in.

The session with the nearest deadline goes first; the writes of one session stay in order. Deadlines
that keep coming nearer must not shut out a far one: while a session has waited for
``PATIENCE_NS``, every other turn is that of whoever has waited longest. What carries no bytes
(word of an end) waits for nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from isthmus.common.clock import NS_PER_S

# Well below transfer.deadline_ms, after which a receiver gives up on blocks that it is owed.
PATIENCE_NS = 2 * NS_PER_S


class Waiting(Protocol):
    """What this module knows of a write. Times are monotonic."""

    expires_ns: int
    queued_ns: int
    num_bytes: int

    @property
    def owner(self) -> object:
        """Its session, compared by identity."""
        ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


class SendQueue(Generic[WaitingT]):
    """Belongs to the connector's thread."""

    def __init__(self) -> None:
        self._lines: dict[object, deque[WaitingT]] = {}
        self._was_patient = False  # the last turn went to whoever had waited longest

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, write: WaitingT) -> None:
        self._lines.setdefault(write.owner, deque()).append(write)

    def drop(self, is_unwanted: Callable[[WaitingT], bool]) -> list[WaitingT]:
        """Takes out what is not wanted any more."""
        dropped: list[WaitingT] = []
        for owner, line in list(self._lines.items()):
            kept: deque[WaitingT] = deque()
            for write in line:
                (dropped if is_unwanted(write) else kept).append(write)
            self._put(owner, kept)
        return dropped

    def next(self, now_ns: int) -> WaitingT | None:
        """Whose turn it is; ``pop`` takes it. None when nothing waits."""
        heads = [line[0] for line in self._lines.values()]
        if not heads:
            return None
        longest = min(heads, key=lambda head: head.queued_ns)
        if not self._was_patient and now_ns - longest.queued_ns >= PATIENCE_NS:
            return longest
        return min(heads, key=_urgency)

    def pop(self, write: WaitingT, now_ns: int) -> None:
        """``write`` came from ``next`` and leaves the queue."""
        line = self._lines[write.owner]
        assert line[0] is write
        line.popleft()
        self._put(write.owner, line)
        waited_long = now_ns - write.queued_ns >= PATIENCE_NS
        self._was_patient = waited_long and not self._was_patient

    def lines(self) -> Iterator[tuple[WaitingT, int]]:
        """Each session's next write, with all bytes that the session has waiting; by deadline."""
        for line in sorted(self._lines.values(), key=lambda line: _urgency(line[0])):
            yield line[0], sum(write.num_bytes for write in line)

    def _put(self, owner: object, line: deque[WaitingT]) -> None:
        if line:
            self._lines[owner] = line
        else:
            del self._lines[owner]


def _urgency(write: Waiting) -> tuple[bool, int, int]:
    return write.num_bytes > 0, write.expires_ns, write.queued_ns
