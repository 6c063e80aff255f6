"""Ends writes that do not end: to a peer that has stopped, over a link that is dead.

Whoever began a session may have forgotten it, and its writes would keep its source blocks, its
place in the window of its link and the peer itself for ever. So every session that has ended comes
to rest by a deadline of its own: its peer is taken from the connector, which fails what is in
flight to it. The peer's other sessions fail with it; it becomes a peer again by a handshake. A peer
is an instance at one epoch: one that has restarted since is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from isthmus.common.errors import IsthmusError, TransferError
from isthmus.common.ids import TransferId
from isthmus.common.logging import RateLimitedLog, get_logger
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.send_session import SendSession

_LET_GO_S = 30.0  # for writes to end whose peer the connector has been told to drop

_log = get_logger("kvtransfer")


class Severing:
    """Belongs to the manager, whose ``sends`` it looks at; lives on its event loop."""

    def __init__(
        self,
        sends: Mapping[TransferId, SendSession],
        forget: Callable[[InstanceRef], Awaitable[None]],
        on_change: Callable[[], None],
        on_broken: Callable[[IsthmusError], None],
    ) -> None:
        """``on_change``: ``deadlines`` are others now; ``on_broken`` is told of a connector that
        does not let go."""
        self._sends = sends
        self._forget = forget
        self._on_change = on_change
        self._on_broken = on_broken
        self._tasks: dict[InstanceRef, asyncio.Task[None]] = {}
        self._log = RateLimitedLog(_log)

    def deadlines(self) -> list[int]:
        """When to call ``sever_due`` (monotonic)."""
        return [send.rests_by_ns for send in self._unquiet()]

    def sever_due(self, now_ns: int) -> None:
        for send in self._unquiet():
            if send.rests_by_ns <= now_ns:
                self._sever(send.ticket.target)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _unquiet(self) -> list[SendSession]:
        """Sessions that have ended, and whose writes are not being ended yet."""
        ended = (send for send in self._sends.values() if not send.is_open)
        return [send for send in ended if send.ticket.target not in self._tasks]

    def _sever(self, peer: InstanceRef) -> None:
        if peer in self._tasks:
            return
        self._log.warning("sever", "writes do not end", peer=peer.instance_id)
        task = asyncio.create_task(self._end_writes(peer), name=f"sever {peer.instance_id}")
        self._tasks[peer] = task
        task.add_done_callback(lambda ended: self._severed(peer, ended))

    def _severed(self, peer: InstanceRef, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            name = peer.instance_id
            _log.error("a peer could not be dropped", peer=name, exc_info=error)
            text = f"{name} could not be dropped: {error!r}"
            self._on_broken(TransferError(text, stage="transfer", instance_id=name))
            return  # it stays there: to try again at once would go on for ever
        del self._tasks[peer]
        self._on_change()  # what else has ended meanwhile has a deadline, too

    async def _end_writes(self, peer: InstanceRef) -> None:
        await self._forget(peer)
        try:
            async with asyncio.timeout(_LET_GO_S):
                for send in list(self._sends.values()):
                    if send.ticket.target == peer and not send.is_open:
                        await send.at_rest()
        except TimeoutError:
            # Nothing here can say any more what is read, so no block could be given on.
            name = peer.instance_id
            text = f"the connector does not let go of {name}"
            self._on_broken(TransferError(text, stage="transfer", instance_id=name))
