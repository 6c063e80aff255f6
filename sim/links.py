"""KV on its way: every transfer gets its share of the two links that it uses.

A transfer moves at the smaller of what its sender's and its receiver's link give it, and each link
divides its bandwidth equally among the transfers on it (what one cannot use, because its other end
is slower, is not given to others: an upper bound of the time). Rates change only when a transfer
begins or ends, so each is an event, not a poll.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import InstanceId
from isthmus.sim.events import EventQueue


@dataclass(eq=False, slots=True)
class Transfer:
    source: InstanceId
    target: InstanceId
    bytes_left: float
    done: Callable[[], None]
    rate: float = 0.0  # bytes per ms
    since_ns: int = 0
    plan_no: int = 0
    is_over: bool = False


@dataclass(slots=True)
class _Link:
    bytes_per_ms: float
    transfers: dict[Transfer, None]


class Links:
    """All links of a cluster. Owns the transfers in flight."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._out: dict[InstanceId, _Link] = {}
        self._in: dict[InstanceId, _Link] = {}

    def add(self, instance_id: InstanceId, bytes_per_ms: float) -> None:
        self._out.setdefault(instance_id, _Link(bytes_per_ms, {}))
        self._in.setdefault(instance_id, _Link(bytes_per_ms, {}))

    def num_in_flight(self) -> int:
        return sum(len(link.transfers) for link in self._out.values())

    def send(
        self, source: InstanceId, target: InstanceId, num_bytes: float, done: Callable[[], None]
    ) -> Transfer:
        """``done`` is called when the last byte is there, not before this returns."""
        transfer = Transfer(source, target, num_bytes, done)
        transfer.since_ns = self._queue.now_ns
        self._out[source].transfers[transfer] = None
        self._in[target].transfers[transfer] = None
        self._share(transfer)
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Nobody is told. One that is over already is none any more."""
        if not transfer.is_over:
            self._end(transfer)

    def _arrived(self, planned: tuple[Transfer, int]) -> None:
        transfer, plan_no = planned
        if plan_no == transfer.plan_no and not transfer.is_over:
            self._end(transfer)
            transfer.done()

    def _end(self, transfer: Transfer) -> None:
        transfer.is_over = True
        del self._out[transfer.source].transfers[transfer]
        del self._in[transfer.target].transfers[transfer]
        self._share(transfer)

    def _share(self, changed: Transfer) -> None:
        """New rates for those on the links on which one came or went."""
        out, into = self._out[changed.source], self._in[changed.target]
        now_ns = self._queue.now_ns
        for transfer in {**out.transfers, **into.transfers}:
            moved = transfer.rate * (now_ns - transfer.since_ns) / NS_PER_MS
            rate = min(_share_of(self._out[transfer.source]), _share_of(self._in[transfer.target]))
            if rate == transfer.rate and transfer.plan_no:
                continue
            transfer.bytes_left = max(0.0, transfer.bytes_left - moved)
            transfer.since_ns, transfer.rate = now_ns, rate
            transfer.plan_no += 1
            wait_ns = round(transfer.bytes_left / rate * NS_PER_MS)
            self._queue.after(wait_ns, self._arrived, (transfer, transfer.plan_no))


def _share_of(link: _Link) -> float:
    return link.bytes_per_ms / len(link.transfers)
