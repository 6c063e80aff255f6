"""Whether a router that has been asked, and says nothing, is alive.

A question may wait in the router for as long as its request lives, so no answer is no sign. While
somebody waits and nothing has been heard for ``BEAT_S``, the router is asked for a sign of life;
without one within ``SILENCE_S`` it is silent, until it gives one. A busy router is never bothered:
its answers are signs enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

BEAT_S = 0.5
SILENCE_S = 2.0


class Pulse:
    """``beat(timeout_s)``: asks, True for a sign of life. ``on_silence`` is called when it has
    become silent. ``run`` in a task of its own."""

    def __init__(
        self, beat: Callable[[float], Awaitable[bool]], on_silence: Callable[[], None]
    ) -> None:
        self.is_silent = False
        self._beat = beat
        self._on_silence = on_silence
        self._num_waiting = 0
        self._num_heard = 0
        self._is_asked = asyncio.Event()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits for an answer."""
        self._num_waiting += 1
        self._is_asked.set()
        try:
            yield
        finally:
            self._num_waiting -= 1

    def heard(self) -> None:
        """An answer to somebody."""
        self._num_heard += 1

    async def run(self) -> None:
        while True:
            await self._is_asked.wait()
            num_heard = self._num_heard
            await asyncio.sleep(BEAT_S)
            if self.is_silent or (self._num_waiting and self._num_heard == num_heard):
                await self._listen()
            elif not self._num_waiting:
                self._is_asked.clear()

    async def _listen(self) -> None:
        was_silent, self.is_silent = self.is_silent, not await self._beat(SILENCE_S)
        if self.is_silent and not was_silent:
            self._on_silence()
