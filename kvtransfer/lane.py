"""One peer: what waits for it, what is in flight to it, and how fast it goes.

::

    queue (nearest deadline first) ─▶ in flight (window of the link) ─▶ DONE, FAILED
      └ NOT_POSTED: its owner has ended, its deadline has passed, or the link is too slow for what
        its session has left

Belongs to the connector's thread; owns the handles of its writes and releases each exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.common.clock import Clock
from isthmus.common.errors import (
    IsthmusError,
    TransferError,
    TransferHopelessError,
    TransferTimeoutError,
)
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.interface import Connector, CopyOp, WriteState
from isthmus.kvtransfer.link import LinkEstimate, ToldEstimate
from isthmus.kvtransfer.send_queue import SendQueue
from isthmus.kvtransfer.writes import Outcome, Sweep, Write, WriteOwner

_ENDED = Copies.of([])  # itself, in the place of what a write that has ended would send


class Lane:
    def __init__(self, connector: Connector, clock: Clock) -> None:
        self.link = LinkEstimate()
        self.queue: SendQueue[Write] = SendQueue()
        self._connector = connector
        self._clock = clock
        self._in_flight: list[Write] = []

    @property
    def is_empty(self) -> bool:
        return not (self.queue or self._in_flight)

    def poll(self, sweep: Sweep) -> None:
        """What has ended of what is in flight."""
        if not self._in_flight:
            return
        self._in_flight = [write for write in self._in_flight if not self._ends(write, sweep)]
        num_wanted = sum(write.num_bytes for write in self._in_flight if write.owner.is_open)
        self.link.looked(num_wanted, self._clock.monotonic_ns())

    def post(self, sweep: Sweep) -> None:
        """Posts in turn while the window has room; a sweep never posts more than a window."""
        if not self.queue:
            return
        self._drop_refused(sweep)
        self._drop_hopeless(sweep)
        window = self.link.window_bytes
        in_flight = sum(write.num_bytes for write in self._in_flight)
        posted = 0
        while (write := self.queue.next(self._clock.monotonic_ns())) is not None:
            if max(in_flight, posted) and max(in_flight, posted) + write.num_bytes > window:
                return
            if (ops := self._ops_of(write, sweep)) is None:
                return
            self.queue.pop(write, self._clock.monotonic_ns())
            if ops is not _ENDED and self._post(write, ops, sweep):
                posted += write.num_bytes
                if not self._ends(write, sweep):
                    self._in_flight.append(write)
                    in_flight += write.num_bytes

    def _drop_refused(self, sweep: Sweep) -> None:
        for write in self.queue.drop(lambda write: self._refusal(write) is not None):
            sweep.end(write, Outcome.NOT_POSTED, self._refusal(write))

    def _drop_hopeless(self, sweep: Sweep) -> None:
        """Those that would be sent in vain: what their session has left, behind what goes first,
        takes longer than there is time."""
        now_ns = self._clock.monotonic_ns()
        ahead = sum(write.num_bytes for write in self._in_flight)
        hopeless: set[WriteOwner] = set()
        for head, num_waiting in self.queue.lines():
            num_left = max(num_waiting, head.owner.num_bytes_left)
            if self.link.is_too_slow(ahead + num_left, now_ns, head.expires_ns):
                hopeless.add(head.owner)
            else:
                ahead += num_waiting
        if hopeless:
            for write in self.queue.drop(lambda write: write.owner in hopeless):
                sweep.end(write, Outcome.NOT_POSTED, self._hopeless(write))

    def _refusal(self, write: Write) -> IsthmusError | None:
        return refusal(write, self._clock.monotonic_ns())

    def _ops_of(self, write: Write, sweep: Sweep) -> Sequence[CopyOp] | None:
        """None while there is no room to stage it, ``_ENDED`` when that failed."""
        if write.stage is None:
            return write.ops
        try:
            return write.stage.try_fill(Copies.of(write.ops))
        except Exception as error:  # noqa: BLE001 - its owner must hear of it; nothing was sent
            sweep.end(write, Outcome.NOT_POSTED, unforeseen("staging", error))
            return _ENDED

    def _post(self, write: Write, ops: Sequence[CopyOp], sweep: Sweep) -> bool:
        """True when the write has a handle, that is, when something may have been sent."""
        try:
            note = (
                write.notification
                if isinstance(write.notification, bytes)
                else write.notification()
            )
        except Exception as error:  # noqa: BLE001 - its owner must hear of it; nothing was sent
            sweep.end(write, Outcome.NOT_POSTED, unforeseen("making the notification", error))
            return False
        # Making the notification may read every byte of the blocks: time for all to have ended.
        if (refusal := self._refusal(write)) is not None:
            sweep.end(write, Outcome.NOT_POSTED, refusal)
            return False
        write.departure = self.link.departs(self._clock.monotonic_ns())
        try:
            write.handle = self._connector.post_write(write.peer, ops, note)
        except TransferError as error:
            sweep.end(write, Outcome.NOT_POSTED, error)
            return False
        except Exception as error:  # noqa: BLE001 - a foreign library: assume the worst
            sweep.end(write, Outcome.FAILED, unforeseen("the connector's post_write", error))
            return False
        sweep.num_posted += 1
        return True

    def _ends(self, write: Write, sweep: Sweep) -> bool:
        assert write.handle is not None
        assert write.departure is not None
        try:
            state = self._connector.poll(write.handle)
            if state is WriteState.IN_PROGRESS:
                return False
            self._connector.release(write.handle)
        except Exception as error:  # noqa: BLE001 - a foreign library: its owner must hear of it
            sweep.end(write, Outcome.FAILED, unforeseen("the connector's poll", error))
            return True
        if state is WriteState.DONE:
            self.link.arrived(write.departure, write.num_bytes, self._clock.monotonic_ns())
            sweep.end(write, Outcome.DONE, None)
        else:
            failure = TransferError(f"a write to {write.peer} failed", stage="transfer")
            sweep.end(write, Outcome.FAILED, failure)
        return True

    def _hopeless(self, write: Write) -> TransferHopelessError:
        return hopeless(self.link, write.owner.num_bytes_left)


def hopeless(link: LinkEstimate | ToldEstimate, num_bytes: int) -> TransferHopelessError:
    rate = (link.bytes_per_s or 0.0) / 1e6
    return TransferHopelessError(
        f"{num_bytes / 1e6:.1f} MB cannot be there by the deadline: the link carries "
        f"{rate:.1f} MB/s",
        stage="transfer",
    )


def refusal(write: Write, now_ns: int) -> IsthmusError | None:
    """Why a write must not be posted any more."""
    if now_ns >= write.expires_ns:
        return TransferTimeoutError("the deadline passed before the write", stage="transfer")
    if not write.owner.is_open:
        return TransferError("the session ended before the write", stage="transfer")
    return None


def may_go(write: Write, now_ns: int) -> bool:
    """False while it has to wait for what it is to bring. Raises why it must not be posted."""
    if (reason := refusal(write, now_ns)) is not None:
        raise reason
    try:
        return write.is_ready is None or write.is_ready()
    except Exception as error:
        raise unforeseen("asking for the step's progress", error) from error


def unforeseen(call: str, error: Exception) -> TransferError:
    return TransferError(f"{call} raised {error!r}", stage="transfer")
