"""A connector with scripted faults around a real one. Deterministic: it counts writes and polls.

A script is a list of ``WRITE:FAULT``, where WRITE counts this connector's writes with bytes from
0, ``N+`` means write N and all later ones, and ``N%M`` every M-th from N on; ``nixl|…`` wraps NIXL
instead of the local connector, ``shm|…`` and ``collective|…`` those::

    2:fail, 5:delay=10, 7+:hang        nixl|0+:drop        nixl|50%100:fail

Each fault is logged, with the head of the notification of the write it hits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from isthmus.common.errors import ConfigError, TransferError
from isthmus.common.logging import get_logger
from isthmus.kvtransfer.checksums import host_bytes
from isthmus.kvtransfer.interface import (
    Connector,
    CopyOp,
    MemoryRegion,
    PeerName,
    WriteHandle,
    WriteState,
)

WRAPPED = ("local", "nixl", "ucx", "shm", "collective")
_FLIP_SEARCH_BYTES = 16 * 2**20
_HEAD_BYTES = 32  # tells which transfer and chunk it was

log = get_logger("fake")


class FaultKind(Enum):
    REFUSE = "refuse"  # nothing is started: post_write raises TransferError
    FAIL = "fail"  # the first half of the copies lands, then the write is FAILED
    DELAY = "delay"  # nothing happens until the handle was polled this many times
    HANG = "hang"  # IN_PROGRESS until the peer is removed; nothing lands
    DROP = "drop"  # the bytes land, the notification does not come
    DUPLICATE = "duplicate"  # the notification comes twice
    CORRUPT = "corrupt"  # the first copy brings bytes of a neighbour
    FLIP = "flip"  # the first byte of the first copy is another one


@dataclass(frozen=True, slots=True)
class Fault:
    first_write: int
    kind: FaultKind
    is_open_ended: bool = False
    num_polls: int = 1
    period: int = 1  # of an open-ended one

    def hits(self, write: int) -> bool:
        if not self.is_open_ended:
            return write == self.first_write
        return write >= self.first_write and (write - self.first_write) % self.period == 0


def parse_script(script: str) -> tuple[str, tuple[Fault, ...]]:
    """(inner connector's name, faults). Raises ConfigError naming what cannot be read."""
    head, bar, tail = script.partition("|")
    inner, text = (head.strip(), tail) if bar else ("local", script)
    if inner not in WRAPPED:
        raise ConfigError(f"transfer.fault_script: unknown connector '{inner}'", stage="config")
    return inner, tuple(_parse_fault(item.strip()) for item in text.split(",") if item.strip())


def _parse_fault(item: str) -> Fault:
    write, _, fault = item.partition(":")
    kind, _, polls = fault.partition("=")
    first, percent, period = write.removesuffix("+").partition("%")
    try:
        return Fault(
            first_write=int(first),
            kind=FaultKind(kind),
            is_open_ended=write.endswith("+") or bool(percent),
            num_polls=int(polls or 1),
            period=_positive(period or "1"),
        )
    except ValueError as error:
        known = ", ".join(kind.value for kind in FaultKind)
        raise ConfigError(
            f"transfer.fault_script: cannot read '{item}', expected WRITE[+|%PERIOD]:FAULT[=POLLS] "
            f"with a fault of {known}",
            stage="config",
        ) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


@dataclass(slots=True)
class _Scripted:
    """A write the script touches. ``inner`` is None while the real one has not been posted."""

    peer: PeerName
    ops: tuple[CopyOp, ...]
    notification: bytes
    kind: FaultKind
    polls_left: int = 0
    inner: WriteHandle | None = None
    is_failed: bool = False


class FakeConnector:
    name = "fake"

    def __init__(self, inner: Connector, faults: Sequence[Fault] = ()) -> None:
        self.domain = inner.domain
        self.is_direct = False
        self._inner = inner
        self._faults = tuple(faults)
        self._num_writes = 0
        self._region: MemoryRegion | None = None
        self._handles = itertools.count(1)
        self._plain: dict[WriteHandle, WriteHandle] = {}
        self._scripted: dict[WriteHandle, _Scripted] = {}

    def register(self, region: MemoryRegion) -> None:
        self._region = region
        self._inner.register(region)
        self.is_direct = self._inner.is_direct

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        return self._inner.add_peer(metadata, region)

    def remove_peer(self, peer: PeerName) -> None:
        for write in self._scripted.values():
            if write.peer == peer and write.inner is None:
                write.is_failed = True
        self._inner.remove_peer(peer)

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        fault = self._next_fault() if ops else None
        handle = WriteHandle(next(self._handles))
        if fault is None:
            self._plain[handle] = self._inner.post_write(peer, ops, notification)
            return handle
        log.info("fault", kind=fault.kind.value, head=notification[:_HEAD_BYTES].hex())
        if fault.kind is FaultKind.REFUSE:
            raise TransferError("refused by script", stage="transfer")
        write = _Scripted(peer, tuple(ops), notification, fault.kind, fault.num_polls)
        if fault.kind not in (FaultKind.DELAY, FaultKind.HANG):
            self._begin(write)
        self._scripted[handle] = write
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        if handle in self._plain:
            return self._inner.poll(self._plain[handle])
        return self._poll_scripted(self._scripted[handle])

    def release(self, handle: WriteHandle) -> None:
        if handle in self._plain:
            self._inner.release(self._plain.pop(handle))
            return
        write = self._scripted.pop(handle)
        if write.inner is not None:
            self._inner.release(write.inner)

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        return self._inner.take_notifications()

    def close(self) -> None:
        self._inner.close()

    # --- inside --------------------------------------------------------------------------------

    def _next_fault(self) -> Fault | None:
        number = self._num_writes
        self._num_writes += 1
        return next((fault for fault in self._faults if fault.hits(number)), None)

    def _begin(self, write: _Scripted) -> None:
        ops, notification = write.ops, write.notification
        if write.kind is FaultKind.FAIL:
            ops, notification = ops[: (len(ops) + 1) // 2], b""
        elif write.kind is FaultKind.DROP:
            notification = b""
        elif write.kind is FaultKind.CORRUPT:
            ops = (self._shifted(ops[0]), *ops[1:])
        elif write.kind is FaultKind.FLIP:
            ops = (*self._flipped(ops[0]), *ops[1:])
        write.inner = self._inner.post_write(write.peer, ops, notification)

    def _shifted(self, op: CopyOp) -> CopyOp:
        """The same place in the target, filled from the copy's neighbour in the source."""
        assert self._region is not None
        after = op.source_offset + op.num_bytes
        has_next = after + op.num_bytes <= self._region.num_bytes
        offset = after if has_next else op.source_offset - op.num_bytes
        return CopyOp(offset, op.target_offset, op.num_bytes)

    def _flipped(self, op: CopyOp) -> tuple[CopyOp, ...]:
        """The same bytes, but for the first, which is taken from where another value is found: the
        source itself stays as it is."""
        region = self._region
        assert region is not None
        assert region.device == "cpu", "flip reads host memory"
        memory = host_bytes(region)
        other = np.flatnonzero(memory[:_FLIP_SEARCH_BYTES] != memory[op.source_offset])
        if not len(other):
            raise TransferError("the region holds one value only", stage="transfer")
        rest = CopyOp(op.source_offset + 1, op.target_offset + 1, op.num_bytes - 1)
        first = CopyOp(int(other[-1]), op.target_offset, 1)
        return (first, rest) if rest.num_bytes else (first,)

    def _poll_scripted(self, write: _Scripted) -> WriteState:
        if write.is_failed:
            return WriteState.FAILED
        if write.inner is None:
            write.polls_left -= 1
            if write.kind is FaultKind.HANG or write.polls_left > 0:
                return WriteState.IN_PROGRESS
            self._begin(write)
        assert write.inner is not None
        state = self._inner.poll(write.inner)
        if state is not WriteState.DONE:
            return state
        if write.kind is FaultKind.DUPLICATE:
            self._inner.release(self._inner.post_write(write.peer, (), write.notification))
        if write.kind is FaultKind.FAIL:
            return WriteState.FAILED
        return state
