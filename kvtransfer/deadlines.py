"""Ends what has taken too long: open sessions at their deadline or when their patience is over, and
later the writes of those that have ended.

One timer for the earliest of all. It needs no request, no step and no connector to fire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import TransferId
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.receive_session import ReceiveSession
from isthmus.kvtransfer.send_session import SendSession
from isthmus.kvtransfer.severing import Severing


class Deadlines:
    """Belongs to the manager, whose tables it looks at; lives on its event loop."""

    def __init__(
        self,
        sends: Mapping[TransferId, SendSession],
        receives: Mapping[TransferId, ReceiveSession],
        clock: Clock,
        forget: Callable[[InstanceRef], Awaitable[None]],
        on_broken: Callable[[IsthmusError], None],
    ) -> None:
        """``forget`` and ``on_broken`` are for ``Severing``."""
        self._sends = sends
        self._receives = receives
        self._clock = clock
        self._severing = Severing(sends, forget, self.arm, on_broken)
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def open_sessions(self) -> list[SendSession | ReceiveSession]:
        sessions: list[SendSession | ReceiveSession] = [
            *self._sends.values(),
            *self._receives.values(),
        ]
        return [session for session in sessions if session.is_open]

    def arm(self) -> None:
        """Call whenever a session has come, has ended, or is owed something else."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = [session.expires_ns for session in self.open_sessions()]
        deadlines += self._severing.deadlines()
        if deadlines and not self._is_closed:
            delay_s = max(0, min(deadlines) - self._clock.monotonic_ns()) / NS_PER_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.expire_due)

    def expire_due(self) -> None:
        """Runs by timer, and before anything that comes late could count."""
        now_ns = self._clock.monotonic_ns()
        for session in self.open_sessions():
            if session.expires_ns <= now_ns:
                session.expire()
        self._severing.sever_due(now_ns)
        self.arm()

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._severing.close()
