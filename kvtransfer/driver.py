"""Drives one connector from one thread of its own.

A connector may copy inside ``post_write`` (NIXL within a machine does), so nothing of it runs on
the event loop. All writes go through sweeps::

    submit ─▶ not ready ─▶ queue of the peer ─▶ in flight (window per peer) ─▶ ended: DONE, FAILED,
              └────────────┴ dropped there when its owner has ended or its    NOT_POSTED
                             deadline has passed

One sweep polls what is in flight, posts what the window admits and takes notifications; it returns
what happened to the event loop, where every decision is made. A patient sweep repeats itself on
this thread until something happens, so waiting does not cost the event loop anything. The driver
owns write handles: each is released exactly once, in the sweep that sees it end.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from isthmus.common.clock import Clock
from isthmus.common.errors import IsthmusError, TransferError, TransferTimeoutError
from isthmus.kvtransfer.checksums import ChunkContent
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.interface import (
    Connector,
    CopyOp,
    MemoryRegion,
    PeerName,
    WriteHandle,
    WriteState,
)

# Most bytes of one write and of one peer's writes in flight. The window bounds what can still land
# after a deadline, so quarantine_ms must outlast it on the slowest link (64 MiB: 13 MB/s at 5 s).
MAX_WRITE_BYTES = 16 * 2**20
WINDOW_BYTES = 64 * 2**20
# Between sweeps that saw nothing the pause doubles from the first to the second. Over TCP nothing
# lands in between, so the longest one also bounds how fast a receiver can take data.
_SHORTEST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.004
# The same while all that is open waits for a step to get on: looking must not cost the step time,
# and nothing is late as long as the step runs. Its end wakes the driver.
LONGEST_PAUSE_COMPUTING_S = 0.02

T = TypeVar("T")


class Outcome(Enum):
    DONE = "done"  # all of it is in the peer's memory
    FAILED = "failed"  # any part of it may be there, or still land
    NOT_POSTED = "not_posted"  # none of it was ever sent


class WriteOwner(Protocol):
    @property
    def is_open(self) -> bool:
        """Read from the connector's thread: a write of an ended owner is not posted."""
        ...

    def write_ended(self, write: Write, outcome: Outcome, error: IsthmusError | None) -> None: ...


@dataclass(slots=True, eq=False)
class Write:
    """One write on its way. ``expires_ns`` is monotonic: it is never posted from then on.

    A ``notification`` that is costly to make is made on the connector's thread, right before the
    write is posted.
    """

    peer: PeerName
    ops: Sequence[CopyOp]
    notification: bytes | Callable[[], bytes]
    expires_ns: int
    owner: WriteOwner
    is_ready: Callable[[], bool] | None = None
    """Until this says True, on the connector's thread, what is to be written is being computed."""
    rank: int = 0  # of this instance, which posts it
    content: ChunkContent | None = None  # its checksums are to be added to the notification
    handle: WriteHandle | None = None
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = Copies.of(self.ops).num_bytes


@dataclass(slots=True)
class Sweep:
    """What one sweep saw. ``started_ns`` (monotonic) was read before anything else."""

    started_ns: int
    ended: list[tuple[Write, Outcome, IsthmusError | None]] = field(default_factory=list)
    notifications: list[tuple[PeerName, bytes]] = field(default_factory=list)
    num_posted: int = 0
    error: Exception | None = None  # of taking notifications

    @property
    def is_empty(self) -> bool:
        return not (self.ended or self.notifications or self.num_posted)


class ConnectorDriver:
    def __init__(self, connector: Connector, region: MemoryRegion, clock: Clock) -> None:
        self._connector = connector
        self._clock = clock
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a connector that hangs cannot keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="kvtransfer", daemon=True)
        self._woken = threading.Event()  # ends the patience of a sweep
        self._inbox: deque[Write] = deque()
        self._unready: list[Write] = []
        self._queues: dict[PeerName, deque[Write]] = {}
        self._in_flight: list[Write] = []
        self.num_open_writes = 0  # submitted and not yet reported as ended
        self.open_bytes = 0
        self._thread.start()
        try:
            self.metadata: bytes = self._call(lambda: self._register(region)).result()
        except BaseException:
            self._jobs.put(None)
            raise

    @property
    def connector_name(self) -> str:
        return self._connector.name

    def submit(self, write: Write) -> None:
        """From the event loop. The next sweep posts it, or tells its owner why not."""
        self.num_open_writes += 1
        self.open_bytes += write.num_bytes
        self._inbox.append(write)
        self.wake()

    def wake(self) -> None:
        """There may be something to see: a patient sweep looks once more and returns."""
        self._woken.set()

    async def sweep(self, patience_s: float = 0.0) -> Sweep:
        """One sweep; repeated up to ``patience_s`` long while it sees nothing and is not woken.

        Ended writes are counted off here; telling their owners is the caller's part."""
        sweep = await asyncio.wrap_future(self._call(lambda: self._sweep_patiently(patience_s)))
        for write, _, _ in sweep.ended:
            self.num_open_writes -= 1
            self.open_bytes -= write.num_bytes
        return sweep

    async def run(self, function: Callable[[], T]) -> T:
        """Runs ``function`` on the connector's thread. Raises what it raises."""
        return await asyncio.wrap_future(self._call(function))

    async def add_peer(self, metadata: bytes, region: MemoryRegion, timeout_s: float) -> PeerName:
        """Raises HandshakeError from the connector and TimeoutError when it takes too long."""
        future = self._call(lambda: self._connector.add_peer(metadata, region))
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            # The call cannot be interrupted: whatever it still brings is taken back.
            self._jobs.put(lambda: self._discard(future))
            raise

    async def remove_peer(self, peer: PeerName, timeout_s: float) -> None:
        """Comes back after ``timeout_s`` at the latest: the connector then does it when it can."""
        removal = asyncio.wrap_future(self._call(lambda: self._connector.remove_peer(peer)))
        await asyncio.wait([removal], timeout=timeout_s)

    async def close(self, timeout_s: float) -> bool:
        """False when the connector did not close in time; its thread is then left behind."""
        future = self._call(self._connector.close)
        self._jobs.put(None)
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the connector's thread -------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the call
                future.set_exception(error)

        self._woken.set()  # before the job is there, which begins by clearing it if it is a sweep
        self._jobs.put(job)
        return future

    def _register(self, region: MemoryRegion) -> bytes:
        self._connector.register(region)
        return self._connector.metadata()

    def _discard(self, future: Future[PeerName]) -> None:
        if future.done() and not future.cancelled() and future.exception() is None:
            self._connector.remove_peer(future.result())

    def _sweep_patiently(self, patience_s: float) -> Sweep:
        self._woken.clear()
        give_up_s = time.monotonic() + patience_s
        pause_s = _SHORTEST_PAUSE_S
        while True:
            sweep = self._sweep()
            if not sweep.is_empty or not self._jobs.empty() or time.monotonic() >= give_up_s:
                return sweep
            if self._woken.wait(pause_s):
                return self._sweep()
            is_computing = self._unready and not (self._in_flight or self._queues)
            longest_s = LONGEST_PAUSE_COMPUTING_S if is_computing else _LONGEST_PAUSE_S
            pause_s = min(2 * pause_s, longest_s)

    def _sweep(self) -> Sweep:
        sweep = Sweep(self._clock.monotonic_ns())
        while self._inbox:
            self._unready.append(self._inbox.popleft())
        self._unready = [write for write in self._unready if not self._enqueues(write, sweep)]
        self._in_flight = [write for write in self._in_flight if not self._ends(write, sweep)]
        for peer in list(self._queues):
            self._post_queue(peer, sweep)
        try:
            sweep.notifications = self._connector.take_notifications()
        except Exception as error:  # noqa: BLE001 - what ended in this sweep must not get lost
            sweep.error = error
        return sweep

    def _enqueues(self, write: Write, sweep: Sweep) -> bool:
        """False while the write has to wait for what it is to bring."""
        if (refusal := self._refusal(write)) is not None:
            sweep.ended.append((write, Outcome.NOT_POSTED, refusal))
            return True
        try:
            if write.is_ready is not None and not write.is_ready():
                return False
        except Exception as error:  # noqa: BLE001 - its owner must hear of it; nothing was sent
            failure = _unforeseen("asking for the step's progress", error)
            sweep.ended.append((write, Outcome.NOT_POSTED, failure))
            return True
        self._queues.setdefault(write.peer, deque()).append(write)
        return True

    def _post_queue(self, peer: PeerName, sweep: Sweep) -> None:
        """Posts in order while the window has room; a sweep never posts more than a window."""
        in_flight = sum(write.num_bytes for write in self._in_flight if write.peer == peer)
        posted = 0
        held: deque[Write] = deque()
        for write in self._queues.pop(peer):
            if (refusal := self._refusal(write)) is not None:
                sweep.ended.append((write, Outcome.NOT_POSTED, refusal))
            elif held or not _fits(write, in_flight) or not _fits(write, posted):
                held.append(write)
            elif self._post(write, sweep):
                posted += write.num_bytes
                if not self._ends(write, sweep):
                    self._in_flight.append(write)
                    in_flight += write.num_bytes
        if held:
            self._queues[peer] = held

    def _refusal(self, write: Write) -> IsthmusError | None:
        if self._clock.monotonic_ns() >= write.expires_ns:
            return TransferTimeoutError("the deadline passed before the write", stage="transfer")
        if not write.owner.is_open:
            return TransferError("the session ended before the write", stage="transfer")
        return None

    def _post(self, write: Write, sweep: Sweep) -> bool:
        """True when the write has a handle, that is, when something may have been sent."""
        try:
            note = (
                write.notification
                if isinstance(write.notification, bytes)
                else write.notification()
            )
        except Exception as error:  # noqa: BLE001 - its owner must hear of it; nothing was sent
            failure = _unforeseen("making the notification", error)
            sweep.ended.append((write, Outcome.NOT_POSTED, failure))
            return False
        # Making the notification may read every byte of the blocks: time for all to have ended.
        if (refusal := self._refusal(write)) is not None:
            sweep.ended.append((write, Outcome.NOT_POSTED, refusal))
            return False
        try:
            write.handle = self._connector.post_write(write.peer, write.ops, note)
        except TransferError as error:
            sweep.ended.append((write, Outcome.NOT_POSTED, error))
            return False
        except Exception as error:  # noqa: BLE001 - a foreign library: assume the worst
            sweep.ended.append(
                (write, Outcome.FAILED, _unforeseen("the connector's post_write", error))
            )
            return False
        sweep.num_posted += 1
        return True

    def _ends(self, write: Write, sweep: Sweep) -> bool:
        assert write.handle is not None
        try:
            state = self._connector.poll(write.handle)
            if state is WriteState.IN_PROGRESS:
                return False
            self._connector.release(write.handle)
        except Exception as error:  # noqa: BLE001 - a foreign library: its owner must hear of it
            sweep.ended.append((write, Outcome.FAILED, _unforeseen("the connector's poll", error)))
            return True
        if state is WriteState.DONE:
            sweep.ended.append((write, Outcome.DONE, None))
        else:
            failure = TransferError(f"a write to {write.peer} failed", stage="transfer")
            sweep.ended.append((write, Outcome.FAILED, failure))
        return True


def _fits(write: Write, used: int) -> bool:
    return used == 0 or used + write.num_bytes <= WINDOW_BYTES


def _unforeseen(call: str, error: Exception) -> TransferError:
    return TransferError(f"{call} raised {error!r}", stage="transfer")
