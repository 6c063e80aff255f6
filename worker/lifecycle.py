"""The life of an instance, from its process's point of view.

::

    STARTING ──▶ READY ──▶ DRAINING ──▶ STOPPED
        └────────────(asked to stop while starting)─────▶

DRAINING refuses new work and lets running work end, for ``drain_ms`` at most. Who asked first does
not matter (a signal, the Drain call, the actuator); a fatal error skips the drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum

from isthmus.common.cluster import INSTANCE_TRANSITIONS, InstanceInfo, InstanceState, LatencyModel
from isthmus.common.errors import DrainingError
from isthmus.common.logging import get_logger
from isthmus.worker.registration import Registration

_DRAIN_POLL_S = 0.05

log = get_logger("lifecycle")


class ExitCode(IntEnum):
    OK = 0
    FAULT = 1  # a restart helps
    CONFIG = 2  # a restart does not help: the model or the configuration has to change


class StopRequest:
    """How the rest of the process asks for the end. The first reason given wins."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.exit_code = ExitCode.OK
        self.reason = ""
        self.drain_ms: int | None = None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def drain(self, reason: str, drain_ms: int | None = None) -> None:
        self._set(ExitCode.OK, reason, drain_ms)

    def fail(self, reason: str) -> None:
        """Ends the process at once, without a drain: what it holds cannot be trusted any more."""
        self._set(ExitCode.FAULT, reason, 0)

    def _set(self, exit_code: ExitCode, reason: str, drain_ms: int | None) -> None:
        if not self._event.is_set():
            self.exit_code, self.reason, self.drain_ms = exit_code, reason, drain_ms
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


class Lifecycle:
    """Owns the state; publishes each change through the registration and to listeners."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration
        self._listeners: list[Callable[[InstanceState], None]] = []

    @property
    def state(self) -> InstanceState:
        return self._registration.info.state

    @property
    def info(self) -> InstanceInfo:
        return self._registration.info

    def subscribe(self, listener: Callable[[InstanceState], None]) -> None:
        self._listeners.append(listener)

    def check_accepting(self) -> None:
        """Raises DrainingError unless new work may start here."""
        if self.state is not InstanceState.READY:
            raise DrainingError(
                f"instance {self.info.instance_id} is {self.state.value}",
                stage="admit",
                instance_id=self.info.instance_id,
            )

    def ready(self, latency: LatencyModel) -> None:
        self._move(InstanceState.READY, latency)

    def stopped(self) -> None:
        self._move(InstanceState.STOPPED)

    async def drain(self, num_running: Callable[[], int], drain_ms: int) -> bool:
        """Refuses new work and waits for the old; True when all of it ended in time."""
        if self.state is InstanceState.STARTING:
            return True
        self._move(InstanceState.DRAINING)
        log.info("draining", running=num_running(), drain_ms=drain_ms)
        try:
            async with asyncio.timeout(drain_ms / 1000):
                while num_running():  # noqa: ASYNC110 (once, at the end of a life)
                    await asyncio.sleep(_DRAIN_POLL_S)
        except TimeoutError:
            log.warning("drain ran out of time", running=num_running())
            return False
        return True

    def _move(self, new: InstanceState, latency: LatencyModel | None = None) -> None:
        INSTANCE_TRANSITIONS.check(self.state, new)
        info = self._registration.info
        self._registration.update(replace(info, state=new, latency=latency or info.latency))
        for listener in self._listeners:
            listener(new)
