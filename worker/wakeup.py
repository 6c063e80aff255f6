"""One thing changes, several streams want to know. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Wakeup:
    """Every subscriber has an event of its own, so that a slow one cannot eat another's wake-up."""

    def __init__(self) -> None:
        self._events: set[asyncio.Event] = set()

    def notify(self) -> None:
        for event in self._events:
            event.set()

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Event]:
        """An event that is set by each change from now on; the subscriber clears it."""
        event = asyncio.Event()
        self._events.add(event)
        try:
            yield event
        finally:
            self._events.discard(event)


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for the event and clears it; False when the time ran out first."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True
