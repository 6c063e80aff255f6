"""An actuator whose processes are futures: tests end them, and see what was asked of them."""

from __future__ import annotations

import asyncio

from isthmus.common.errors import InternalError
from isthmus.controlplane.actuators.base import Exit, ProcessSpec


class FakeHandle:
    num_restarts = 0

    def __init__(self, spec: ProcessSpec, pid: int, ignores_stop: bool) -> None:
        self.spec = spec
        self.pid = pid
        self.stop_timeout_s: float | None = None
        self.was_killed = False
        self._ignores_stop = ignores_stop
        self._ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    @property
    def is_alive(self) -> bool:
        return not self._ended.done()

    def end(self, reason: str = "exit code 1", *, is_final: bool = False) -> None:
        if self.is_alive:
            self._ended.set_result(Exit(reason, is_final))

    async def wait(self) -> Exit:
        return await asyncio.shield(self._ended)

    async def stop(self, timeout_s: float) -> None:
        self.stop_timeout_s = timeout_s
        if self._ignores_stop:
            self.kill()
        self.end("exit code 0")

    def kill(self) -> None:
        if self.is_alive:
            self.was_killed = True
            self.end("ended by SIGKILL")


class FakeActuator:
    """Implements ``Actuator``; ``handles`` are all that were ever started, in order."""

    def __init__(self) -> None:
        self.handles: list[FakeHandle] = []
        self.refuse_starts = 0
        self.ignores_stop = False

    async def open(self) -> None:
        return None

    async def start(self, spec: ProcessSpec) -> FakeHandle:
        if self.refuse_starts:
            self.refuse_starts -= 1
            raise InternalError("no room")
        handle = FakeHandle(spec, 1000 + len(self.handles), self.ignores_stop)
        self.handles.append(handle)
        return handle

    async def close(self) -> None:
        return None

    def alive(self) -> list[str]:
        return sorted(handle.spec.name for handle in self.handles if handle.is_alive)

    def last(self, name: str) -> FakeHandle:
        return [handle for handle in self.handles if handle.spec.name == name][-1]
