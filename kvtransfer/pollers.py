"""Drives the ports of an instance: one task a rank, which sweeps while there is something to see.

A port is swept while a write is on its way or a target block could still be written; else its task
sleeps until it is kicked, so an idle instance costs nothing. A connector that hangs in a call would
leave every block that a peer may write to in quarantine for ever, without a word: a sweep that does
not come back is as bad as a lost rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from isthmus.common.errors import InstanceLostError, IsthmusError, TransferError
from isthmus.common.logging import get_logger
from isthmus.kvtransfer.rank_port import RankPort

# How long a sweep may wait for something to happen; resting sessions count time between sweeps.
_PATIENCE_S = 0.05
_PATIENCE_SENDING_S = 0.5  # while there is nothing to be received

# A sweep that was under way at so many looks in a row hangs: time in which this process was stopped
# is one look.
_LOOK_S = 5.0
_MAX_LOOKS = 12

log = get_logger("kvtransfer")


class Pollers:
    """Lives on one event loop."""

    def __init__(
        self,
        ports: Sequence[RankPort],
        sweep: Callable[[int, float], Awaitable[None]],
        is_receiving: Callable[[], bool],
        on_broken: Callable[[IsthmusError], None],
    ) -> None:
        """``sweep`` drives the port of one rank, for so many seconds at most; ``on_broken`` is told
        why a rank is not driven any more (it is lost, or a bug)."""
        self._ports = ports
        self._sweep = sweep
        self._is_receiving = is_receiving
        self._on_broken = on_broken
        self._kicks = [asyncio.Event() for _ in ports]
        self._looks: dict[int, int] = {}  # of ranks that are swept: at so many looks already
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Call once."""
        self._tasks.append(asyncio.create_task(self._watch(), name="kvtransfer-watch"))
        for rank in range(len(self._ports)):
            task = asyncio.create_task(self._poll(rank), name=f"kvtransfer-poll-{rank}")
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def kick(self, rank: int) -> None:
        """There is something to do for it."""
        self._kicks[rank].set()

    def look(self) -> None:
        """Something may have changed: all look at once."""
        for port, kick in zip(self._ports, self._kicks, strict=True):
            kick.set()
            port.wake()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _poll(self, rank: int) -> None:
        port, kick = self._ports[rank], self._kicks[rank]
        while True:
            if not (port.num_open_writes or self._is_receiving()):
                await kick.wait()
            kick.clear()
            self._looks[rank] = 0
            try:
                patience_s = _PATIENCE_S if self._is_receiving() else _PATIENCE_SENDING_S
                await self._sweep(rank, patience_s)
            finally:
                del self._looks[rank]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for rank in self._looks:
                self._looks[rank] += 1
                if self._looks[rank] > _MAX_LOOKS:
                    log.error("a connector hangs", rank=rank)
                    text = f"a connector of rank {rank} does not come back"
                    self._on_broken(TransferError(text, stage="transfer"))
                    return

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A poller ends by ``close``; any other end must not leave sessions waiting for it."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, InstanceLostError):
            log.error("a rank is lost", problem=error.message)
            self._on_broken(error)
        else:
            log.error("poller failed", exc_info=error)
            failure = TransferError(f"the transfer poller failed: {error!r}", stage="transfer")
            self._on_broken(failure)
