"""NIXL (UCX): one-sided writes between processes and machines, host and GPU memory.

What was measured and what follows from it (``docs/kv-transfer.md``):

- The progress thread spins on a core all the time, so there is none: the connector makes progress
  only inside ``poll`` and ``take_notifications``. A write over TCP therefore lands only while the
  *receiver* takes notifications.
- Within a machine UCX copies inside ``transfer()`` (process_vm_writev), even into a stopped peer.
- DONE means flushed: UCX waits for the peer's acknowledgement before NIXL sends the notification.
- A killed peer fails open writes; a stopped one leaves them in progress for ever.
- Preparing descriptors costs microseconds each, so blocks of both sides are prepared once, and a
  write of whole blocks names them by index.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from isthmus.common.errors import HandshakeError, TransferError
from isthmus.kvtransfer.connectors.local import check_bounds
from isthmus.kvtransfer.connectors.ucx_process import claim, may_use_rdma
from isthmus.kvtransfer.copies import Copies, Rows
from isthmus.kvtransfer.interface import (
    CopyOp,
    MemoryRegion,
    PeerName,
    WriteHandle,
    WriteState,
)

claim("nixl")
try:
    from nixl_cu13 import _bindings
    from nixl_cu13._api import nixl_agent, nixl_agent_config
except ImportError as missing:
    raise TransferError(
        "the nixl connector needs the wheel nixl-cu13: pip install 'isthmus[nixl]'",
        stage="register",
    ) from missing

logging.getLogger("nixl").setLevel(logging.WARNING)  # after the import, which configures it

_NIXL_ERRORS: tuple[type[Exception], ...] = (
    _bindings.nixlBackendError,
    _bindings.nixlCancelledError,
    _bindings.nixlInvalidParamError,
    _bindings.nixlMismatchError,
    _bindings.nixlNotAllowedError,
    _bindings.nixlNotFoundError,
    _bindings.nixlNotPostedError,
    _bindings.nixlNotSupportedError,
    _bindings.nixlRemoteDisconnectError,
    _bindings.nixlRepostActiveError,
    _bindings.nixlUnknownError,
)
_BAD_METADATA: tuple[type[Exception], ...] = (msgspec.DecodeError, *_NIXL_ERRORS)
# NIXL does not tell when a notification without data has left. It leaves at once over an open
# connection; over one that is still being made it needs both ends to make progress for a while.
_LONE_NOTIFICATION_S = 0.25
_STATES = {"DONE": WriteState.DONE, "PROC": WriteState.IN_PROGRESS, "ERR": WriteState.FAILED}


class _Metadata(msgspec.Struct, frozen=True):
    device: str
    agent: bytes


@dataclass(frozen=True, slots=True)
class _Side:
    """One region and its prepared block descriptors."""

    region: MemoryRegion
    blocks: Any  # nixl_prepped_dlist_handle

    @property
    def memory(self) -> Literal["DRAM", "VRAM"]:
        return "DRAM" if self.region.device == "cpu" else "VRAM"

    @property
    def device_id(self) -> int:
        return int(self.region.device.partition(":")[2] or 0)


@dataclass(slots=True)
class _OpenWrite:
    peer: PeerName
    transfer: Any  # nixl_xfer_handle; None for a lone notification and once it has ended
    state: WriteState = WriteState.IN_PROGRESS
    driven_until_s: float = 0.0  # of a lone notification, monotonic


class NixlConnector:
    name = "nixl"
    domain = ""

    def __init__(self, agent_name: str, block_bytes: int) -> None:
        """Writes of whole multiples of ``block_bytes`` take the prepared path."""
        self._block_bytes = block_bytes
        self.is_direct = False
        self._agent = nixl_agent(agent_name, nixl_agent_config(enable_prog_thread=False))
        if "UCX" not in self._agent.backends:
            raise TransferError("NIXL has no UCX backend here", stage="register")
        self._registered: Any = None
        self._mine: _Side | None = None
        self._peers: dict[PeerName, _Side] = {}
        self._handles = itertools.count(1)
        self._writes: dict[WriteHandle, _OpenWrite] = {}
        self._arrived: list[tuple[PeerName, bytes]] = []

    def register(self, region: MemoryRegion) -> None:
        side = _Side(region, None)
        descriptor = (region.base_address, region.num_bytes, side.device_id, "")
        try:
            self._registered = self._agent.register_memory([descriptor], side.memory)
            self._mine = self._prepared("NIXL_INIT_AGENT", region)
        except _NIXL_ERRORS as error:
            raise TransferError(f"NIXL cannot register {region}", stage="register") from error
        self.is_direct = side.memory == "VRAM" or may_use_rdma()

    def metadata(self) -> bytes:
        device = self._local.region.device
        return msgspec.msgpack.encode(_Metadata(device, self._agent.get_agent_metadata()))

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        try:
            theirs = msgspec.msgpack.decode(metadata, type=_Metadata)
            agent = self._agent.add_remote_agent(theirs.agent)
        except _BAD_METADATA as error:
            raise HandshakeError(
                f"NIXL does not accept the peer's metadata: {error!r}", stage="handshake"
            ) from error
        peer = PeerName(agent.decode() if isinstance(agent, bytes) else agent)
        try:
            there = MemoryRegion(region.base_address, region.num_bytes, theirs.device)
            self._peers[peer] = self._prepared(peer, there)
        except _NIXL_ERRORS as error:
            self._agent.remove_remote_agent(peer)
            raise HandshakeError(
                f"{peer} has not registered the memory it offers", stage="handshake"
            ) from error
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        side = self._peers.pop(peer, None)
        if side is None:
            return
        for write in self._writes.values():
            if write.peer == peer and write.state is WriteState.IN_PROGRESS:
                self._finish(write, WriteState.FAILED)
        with suppress(*_NIXL_ERRORS):  # of a peer that is dead already
            side.blocks.release()
            self._agent.remove_remote_agent(peer)

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        side = self._peers.get(peer)
        if side is None:
            raise TransferError(f"{peer} is not a peer", stage="transfer")
        check_bounds(ops, self._local.region, side.region)
        try:
            transfer = self._prepare_write(peer, side, ops, notification)
        except _NIXL_ERRORS as error:
            raise TransferError(
                f"NIXL refused a write to {peer}: {error!r}", stage="transfer"
            ) from (error)
        write = _OpenWrite(peer, transfer)
        handle = WriteHandle(next(self._handles))
        self._writes[handle] = write
        if transfer is None:
            write.driven_until_s = time.monotonic() + _LONE_NOTIFICATION_S
        else:
            self._advance(write, lambda: self._agent.transfer(transfer))
        return handle

    def poll(self, handle: WriteHandle) -> WriteState:
        write = self._writes[handle]
        if write.state is WriteState.IN_PROGRESS and write.transfer is not None:
            self._advance(write, lambda: self._agent.check_xfer_state(write.transfer))
        elif write.state is WriteState.IN_PROGRESS:
            self._progress()
            if time.monotonic() >= write.driven_until_s:
                write.state = WriteState.DONE
        return write.state

    def release(self, handle: WriteHandle) -> None:
        del self._writes[handle]

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        self._progress()
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)
        if self._mine is not None:
            self._mine.blocks.release()
            self._mine = None
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None
        del self._agent

    # --- inside --------------------------------------------------------------------------------

    def _progress(self) -> None:
        for agent, payloads in self._agent.get_new_notifs().items():
            self._arrived.extend((PeerName(agent), payload) for payload in payloads)

    @property
    def _local(self) -> _Side:
        if self._mine is None:
            raise TransferError("no region is registered", stage="transfer")
        return self._mine

    def _prepared(self, agent: str, region: MemoryRegion) -> _Side:
        side = _Side(region, None)
        count = region.num_bytes // self._block_bytes
        rows: npt.NDArray[np.uint64] = np.empty((count, 3), dtype=np.uint64)  # address, len, device
        rows[:, 0] = region.base_address + np.arange(count, dtype=np.uint64) * self._block_bytes
        rows[:, 1] = self._block_bytes
        rows[:, 2] = side.device_id
        return _Side(region, self._agent.prep_xfer_dlist(agent, rows, side.memory))

    def _prepare_write(
        self, peer: PeerName, side: _Side, ops: Sequence[CopyOp], notification: bytes
    ) -> Any:
        """A transfer handle; None for a lone notification, which has been handed over."""
        if not ops:
            self._agent.send_notif(peer, notification)
            return None
        rows = Copies.of(ops).rows
        indices = self._block_indices(rows)
        if indices is not None:
            return self._agent.make_prepped_xfer(
                "WRITE", self._local.blocks, indices[0], side.blocks, indices[1], notification
            )
        return self._agent.initialize_xfer(
            "WRITE",
            self._descriptors(self._local, rows[:, 0], rows[:, 2]),
            self._descriptors(side, rows[:, 1], rows[:, 2]),
            peer,
            notification,
        )

    def _block_indices(
        self, rows: Rows
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None:
        """(source blocks, target blocks), or None when some copy is not of whole blocks."""
        blocks, rest = np.divmod(rows, self._block_bytes)
        if rest.any():
            return None
        # Each copy's first blocks and those behind them, side by side.
        within = np.arange(blocks[:, 2].sum()) - np.repeat(
            np.cumsum(blocks[:, 2]) - blocks[:, 2], blocks[:, 2]
        )
        sources, targets = np.repeat(blocks[:, :2], blocks[:, 2], axis=0).T + within
        return sources.astype(np.int32), targets.astype(np.int32)

    def _descriptors(self, side: _Side, offsets: Rows, sizes: Rows) -> Any:
        base, device = side.region.base_address, side.device_id
        rows: npt.NDArray[np.uint64] = np.empty((len(offsets), 3), dtype=np.uint64)
        rows[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
        rows[:, 1] = sizes
        rows[:, 2] = device
        return self._agent.get_xfer_descs(rows, side.memory)

    def _advance(self, write: _OpenWrite, ask: Any) -> None:
        try:
            state = _STATES[ask()]
        except _NIXL_ERRORS:  # remote disconnect and the like: it may have landed in part
            state = WriteState.FAILED
        write.state = state
        if state is not WriteState.IN_PROGRESS:
            self._finish(write, state)

    @staticmethod
    def _finish(write: _OpenWrite, state: WriteState) -> None:
        write.state = state
        if write.transfer is not None:
            with suppress(*_NIXL_ERRORS):
                write.transfer.release()
            write.transfer = None
