"""Drives one connector, whose memory is registered already, from one thread of its own.

A connector may copy inside ``post_write`` (NIXL within a machine does), so nothing of it runs on
the event loop. All writes go through sweeps::

    submit ─▶ not ready ─▶ queue of the peer ─▶ in flight (window of the link) ─▶ ended: DONE,
              └────────────┴ dropped there when its owner has ended, its deadline FAILED, NOT_POSTED
                             has passed, or the link is too slow for what its session has left

One sweep polls what is in flight, posts what the windows admit (see ``link``), nearest deadline
first (see ``send_queue``), and takes notifications; it returns what happened to the event loop,
where every decision is made. A patient sweep repeats itself on this thread until something happens,
so waiting does not cost the event loop anything. The driver owns write handles: each is released
exactly once, in the sweep that sees it end.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from isthmus.common.clock import Clock
from isthmus.common.errors import IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.tasks import tell_if_broken
from isthmus.kvtransfer.interface import Connector, MemoryRegion, PeerName, Reached, Reaching
from isthmus.kvtransfer.lane import Lane, hopeless, may_go
from isthmus.kvtransfer.link import LinkEstimate
from isthmus.kvtransfer.writes import Outcome, Sweep, Write

# Between sweeps that saw nothing the pause doubles from the first to the second. Over TCP nothing
# lands in between, so the longest one also bounds how fast a receiver can take data.
_SHORTEST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.004
# The same while all that is open waits for a step to get on: looking must not cost the step time,
# and nothing is late as long as the step runs. Its end wakes the driver.
LONGEST_PAUSE_COMPUTING_S = 0.02

T = TypeVar("T")

_log = get_logger("kvtransfer")


class ConnectorDriver:
    def __init__(self, connector: Connector, clock: Clock) -> None:
        self._connector = connector
        self._clock = clock
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a connector that hangs cannot keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="kvtransfer", daemon=True)
        self._woken = threading.Event()  # ends the patience of a sweep
        self._inbox: deque[Write] = deque()
        self._unready: list[Write] = []
        self._computing_pause_s = _SHORTEST_PAUSE_S  # goes on over sweeps that see nothing
        self._lanes: dict[PeerName, Lane] = {}
        self._peers: set[PeerName] = set()
        self.num_open_writes = 0  # submitted and not yet reported as ended
        self.open_bytes = 0
        self._is_closing = False
        self._thread.start()

    def submit(self, write: Write) -> None:
        """From the event loop. The next sweep posts it, or tells its owner why not."""
        self.num_open_writes += 1
        self.open_bytes += write.num_bytes
        self._inbox.append(write)
        self.wake()

    def bytes_per_s(self, peer: PeerName) -> float | None:
        """What the link to ``peer`` was measured to carry; None while that is not known."""
        return self._link(peer).bytes_per_s

    def max_write_bytes(self, peer: PeerName) -> int:
        """How large a write should be at most: a window is several."""
        return self._link(peer).max_write_bytes

    def check_in_time(self, peer: PeerName, num_bytes: int, deadline_ns: int) -> None:
        """Raises TransferHopelessError when so many bytes surely cannot be at ``peer`` by
        ``deadline_ns`` (monotonic)."""
        link = self._link(peer)
        if link.is_too_slow(num_bytes, self._clock.monotonic_ns(), deadline_ns):
            raise hopeless(link, num_bytes)

    def _link(self, peer: PeerName) -> LinkEstimate:
        lane = self._lanes.get(peer)
        return lane.link if lane is not None else LinkEstimate()

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
        connector = self._connector
        if isinstance(connector, Reaching):
            future = self._reach(connector, metadata, region)
        else:
            future = self._call(lambda: self._joined(connector.add_peer(metadata, region)))
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            # The call cannot be interrupted: whatever it still brings is taken back, before another
            # call can make the same peer anew.
            future.cancel()
            self._jobs.put(lambda: self._discard(future))
            raise

    async def remove_peer(self, peer: PeerName, timeout_s: float) -> None:
        """Comes back after ``timeout_s`` at the latest: the connector then does it when it can."""
        removal = asyncio.wrap_future(self._call(lambda: self._remove_peer(peer)))
        removal.add_done_callback(tell_if_broken(_log, "a connector did not drop a peer"))
        await asyncio.wait([removal], timeout=timeout_s)

    async def close(self, timeout_s: float) -> bool:
        """False when the connector did not close in time; its thread is then left behind."""
        self._is_closing = True
        future = self._call(self._connector.close)
        self._jobs.put(None)
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
        except TimeoutError:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _reach(
        self, connector: Reaching, metadata: bytes, region: MemoryRegion
    ) -> Future[PeerName]:
        """Waits for the peer on a thread of its own: the connector's would make all peers wait."""
        future: Future[PeerName] = Future()

        def reach() -> None:
            try:
                reached = connector.reach(metadata, region)
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the peer
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
                return
            if self._is_closing:  # nobody would admit it
                reached.drop()
                future.cancel()
                return
            self._woken.set()
            self._jobs.put(lambda: self._admit(reached, future))

        threading.Thread(target=reach, name="kv-reach", daemon=True).start()
        return future

    # --- on the connector's thread -------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            _fulfil(future, function)

        self._woken.set()  # before the job is there, which begins by clearing it if it is a sweep
        self._jobs.put(job)
        return future

    def _joined(self, peer: PeerName) -> PeerName:
        self._peers.add(peer)
        return peer

    def _admit(self, reached: Reached, future: Future[PeerName]) -> None:
        if future.set_running_or_notify_cancel():
            _fulfil(future, lambda: self._joined(reached.admit()))
        else:
            reached.drop()

    def _remove_peer(self, peer: PeerName) -> None:
        self._peers.discard(peer)
        self._drop_lanes()
        self._connector.remove_peer(peer)

    def _drop_lanes(self) -> None:
        """Those of peers that are not there, once nothing is left in them: a write may come to its
        lane after its peer has gone."""
        lanes = self._lanes.items()
        for peer in [peer for peer, lane in lanes if peer not in self._peers and lane.is_empty]:
            del self._lanes[peer]

    def _discard(self, future: Future[PeerName]) -> None:
        if future.done() and not future.cancelled() and future.exception() is None:
            self._remove_peer(future.result())

    def _sweep_patiently(self, patience_s: float) -> Sweep:
        self._woken.clear()
        give_up_s = time.monotonic() + patience_s
        pause_s = _SHORTEST_PAUSE_S
        while True:
            sweep = self._sweep()
            if not sweep.is_empty:
                self._computing_pause_s = _SHORTEST_PAUSE_S
            if not sweep.is_empty or not self._jobs.empty() or time.monotonic() >= give_up_s:
                return sweep
            if self._is_computing:
                pause_s = self._computing_pause_s
                self._computing_pause_s = min(2 * pause_s, LONGEST_PAUSE_COMPUTING_S)
            if self._woken.wait(pause_s):
                return self._sweep()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @property
    def _is_computing(self) -> bool:
        """All that is open waits for a step to get on."""
        lanes = self._lanes.values()
        return bool(self._unready) and all(lane.is_empty for lane in lanes)

    def _sweep(self) -> Sweep:
        sweep = Sweep(self._clock.monotonic_ns())
        while self._inbox:
            self._unready.append(self._inbox.popleft())
        self._unready = [write for write in self._unready if not self._enqueues(write, sweep)]
        for lane in self._lanes.values():
            lane.poll(sweep)
        for lane in self._lanes.values():
            lane.post(sweep)
        self._drop_lanes()
        try:
            sweep.notifications = self._connector.take_notifications()
        except Exception as error:  # noqa: BLE001 - what ended in this sweep must not get lost
            sweep.error = error
        return sweep

    def _enqueues(self, write: Write, sweep: Sweep) -> bool:
        """False while the write has to wait for what it is to bring."""
        now_ns = self._clock.monotonic_ns()
        try:
            if not may_go(write, now_ns):
                return False
        except IsthmusError as error:
            sweep.end(write, Outcome.NOT_POSTED, error)
            return True
        write.queued_ns = now_ns
        self._lane(write.peer).queue.add(write)
        return True

    def _lane(self, peer: PeerName) -> Lane:
        lane = self._lanes.get(peer)
        if lane is None:
            lane = self._lanes[peer] = Lane(self._connector, self._clock)
        return lane


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the call
        future.set_exception(error)
