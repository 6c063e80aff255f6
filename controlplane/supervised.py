"""One process that should be running: started, watched, started again with growing pauses.

::

    PENDING ──▶ RUNNING ──▶ BACKOFF ──▶ RUNNING …        ended by itself: again, later each time
                   │           │
                   ├──▶ FAILED ◀                         no restarts left
                   └──▶ STOPPING ──▶ STOPPED ◀── any     told to stop

``run`` is the only writer of the state while it runs; ``stop`` makes it return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import TypeVar

from isthmus.common.backoff import Backoff
from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.errors import IsthmusError
from isthmus.common.state_machine import Transitions
from isthmus.controlplane.actuators.base import Actuator, Exit, Handle, ProcessSpec

ResultT = TypeVar("ResultT")

HEALTHY_AFTER_S = 30.0
UNLIMITED = -1


class ProcessState(Enum):
    PENDING = "pending"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


_STOP = frozenset({ProcessState.STOPPING})
PROCESS_TRANSITIONS: Transitions[ProcessState] = Transitions(
    {
        ProcessState.PENDING: frozenset(
            {ProcessState.RUNNING, ProcessState.BACKOFF, ProcessState.FAILED}
        )
        | _STOP,
        ProcessState.RUNNING: frozenset({ProcessState.BACKOFF, ProcessState.FAILED}) | _STOP,
        ProcessState.BACKOFF: frozenset(
            {ProcessState.RUNNING, ProcessState.BACKOFF, ProcessState.FAILED}  # refused again
        )
        | _STOP,
        ProcessState.STOPPING: frozenset({ProcessState.STOPPED}),
        ProcessState.STOPPED: frozenset(),
        ProcessState.FAILED: frozenset(),
    }
)


class SupervisedProcess:
    """Owns the handle of one process. ``on_exit`` hears of every end that nobody asked for."""

    def __init__(
        self,
        spec: ProcessSpec,
        actuator: Actuator,
        clock: Clock,
        max_restarts: int = UNLIMITED,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_exit: Callable[[SupervisedProcess], None] = lambda _: None,
    ) -> None:
        self.spec = spec
        self.state = ProcessState.PENDING
        self.last_exit = ""
        self._actuator = actuator
        self._clock = clock
        self._max_restarts = max_restarts
        self._sleep = sleep
        self._on_exit = on_exit
        self._backoff = Backoff(initial_s=0.5, cap_s=30.0)
        self._handle: Handle | None = None
        self._own_restarts = 0
        self._past_restarts = 0  # of handles that are gone
        self._stop_asked = asyncio.Event()
        self._stopped = asyncio.Event()
        self._drain_s = 0.0

    @property
    def pid(self) -> int:
        return self._handle.pid if self._handle else 0

    @property
    def num_restarts(self) -> int:
        under_handle = self._handle.num_restarts if self._handle else 0
        return self._own_restarts + self._past_restarts + under_handle

    async def run(self) -> None:
        """Returns when the process was told to stop or has no restarts left."""
        try:
            while not self._stop_asked.is_set():
                started_ns = self._clock.monotonic_ns()
                end = await self._run_once()
                self.last_exit = end.reason
                if self._stop_asked.is_set():
                    break
                if self._clock.monotonic_ns() - started_ns > HEALTHY_AFTER_S * NS_PER_S:
                    self._backoff.reset()
                if end.is_final or not self._has_restarts_left():
                    self._move(ProcessState.FAILED)
                    self._on_exit(self)
                    return
                self._move(ProcessState.BACKOFF)
                self._on_exit(self)
                await self._unless_stopped(self._sleep(self._backoff.next_s()))
                self._own_restarts += not self._stop_asked.is_set()
            if self.state is not ProcessState.STOPPING:
                self._move(ProcessState.STOPPING)
            self._move(ProcessState.STOPPED)
        finally:
            self._stopped.set()

    async def stop(self, drain_s: float) -> None:
        """Drains the process, ends it after ``drain_s``, returns when ``run`` is through."""
        self._drain_s = drain_s
        self._stop_asked.set()
        await self._stopped.wait()

    def kill(self) -> None:
        """Ends the process at once; it is started again unless it was told to stop."""
        if self._handle is not None:
            self._handle.kill()

    def _has_restarts_left(self) -> bool:
        return self._max_restarts == UNLIMITED or self.num_restarts < self._max_restarts

    async def _run_once(self) -> Exit:
        try:
            handle = self._handle = await self._actuator.start(self.spec)
        except IsthmusError as error:
            return Exit(error.message)
        self._move(ProcessState.RUNNING)
        try:
            end = await self._unless_stopped(handle.wait())
            if end is None:
                self._move(ProcessState.STOPPING)
                await handle.stop(self._drain_s)
                end = await handle.wait()
            return end
        finally:
            handle.kill()  # gone already, unless this task was cancelled
            self._past_restarts += handle.num_restarts
            self._handle = None

    async def _unless_stopped(self, awaitable: Awaitable[ResultT]) -> ResultT | None:
        """The result, or None as soon as ``stop`` was called."""
        work = asyncio.ensure_future(awaitable)
        asked = asyncio.ensure_future(self._stop_asked.wait())
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            for task in (work, asked):
                task.cancel()
            await asyncio.gather(work, asked, return_exceptions=True)

    def _move(self, state: ProcessState) -> None:
        self.state = PROCESS_TRANSITIONS.check(self.state, state)
