"""One connector in a process of its own, driven call by call: the far end of contract tests.

``ConnectorProcess`` is the parent's handle. Every call is answered before it returns and the child
does nothing between calls, so a test decides exactly when either side makes progress.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from isthmus.common.shared_memory import create_shared_memory
from isthmus.kvtransfer.connectors.fake import FakeConnector, Fault
from isthmus.kvtransfer.connectors.local import LocalConnector, LocalFabric
from isthmus.kvtransfer.connectors.shm import ShmConnector
from isthmus.kvtransfer.interface import (
    Connector,
    CopyOp,
    MemoryRegion,
    PeerName,
    WriteHandle,
    WriteState,
)

CALL_TIMEOUT_S = 60.0  # a process may have to load torch first


def drive_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Calls ``condition``, which drives connectors, until it holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"condition did not hold within {timeout_s} s")


class ConnectorEnd:
    """A connector with the memory it registered; the same calls as ``ConnectorProcess``."""

    def __init__(self, connector: Connector, num_bytes: int, seed: int) -> None:
        self.connector = connector
        mapping, self._fd = create_shared_memory(num_bytes)
        self.memory = np.frombuffer(mapping, dtype=np.uint8)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
        self.region = MemoryRegion(self.memory.ctypes.data, num_bytes, fd=self._fd)
        connector.register(self.region)

    def introduce(self) -> tuple[bytes, MemoryRegion]:
        return self.connector.metadata(), self.region

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        return self.connector.add_peer(metadata, region)

    def remove_peer(self, peer: PeerName) -> None:
        self.connector.remove_peer(peer)

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        return self.connector.post_write(peer, ops, notification)

    def poll(self, handle: WriteHandle) -> WriteState:
        return self.connector.poll(handle)

    def release(self, handle: WriteHandle) -> None:
        self.connector.release(handle)

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        return self.connector.take_notifications()

    def read(self) -> bytes:
        return self.memory.tobytes()

    def close(self) -> None:
        self.connector.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_end(
    kind: str,
    name: str,
    num_bytes: int,
    seed: int,
    block_bytes: int,
    fabric: LocalFabric | None = None,
    faults: Sequence[Fault] = (),
) -> ConnectorEnd:
    return ConnectorEnd(_make_connector(kind, name, block_bytes, fabric, faults), num_bytes, seed)


def _make_connector(
    kind: str, name: str, block_bytes: int, fabric: LocalFabric | None, faults: Sequence[Fault]
) -> Connector:
    if kind == "nixl":
        from isthmus.kvtransfer.connectors.nixl import NixlConnector

        return NixlConnector(name, block_bytes)
    if kind == "ucx":
        from isthmus.kvtransfer.connectors.ucx import UcxConnector

        return UcxConnector(name, "127.0.0.1")
    if kind == "shm":
        return ShmConnector(name)
    if kind == "collective":
        from isthmus.kvtransfer.connectors.collective import CollectiveConnector

        return CollectiveConnector(name, "127.0.0.1")
    assert fabric is not None
    local = LocalConnector(name, fabric)
    return FakeConnector(local, faults) if kind == "fake" else local


class ChildProcess:
    """A module that serves calls in a process of its own. Errors of a call are raised here."""

    def __init__(self, module: str, tls: str = "") -> None:
        """``tls`` becomes the child's UCX_TLS when it is not empty."""
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **({"UCX_TLS": tls} if tls else {})},
        )
        theirs.close()
        self._pipe = Connection(ours.detach())

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        if not self._pipe.poll(CALL_TIMEOUT_S):
            raise TimeoutError(f"{method} was not answered")
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the process: in order when it still answers, by SIGKILL otherwise."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGCONT)
                self.call("close")
                self._process.wait(CALL_TIMEOUT_S)
        except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):
            pass
        finally:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._pipe.close()


class ConnectorProcess(ChildProcess):
    def __init__(
        self, kind: str, name: str, num_bytes: int, seed: int, block_bytes: int, tls: str = ""
    ) -> None:
        super().__init__("tests.support.connector_process", tls)
        self.call("make", kind, name, num_bytes, seed, block_bytes)

    def introduce(self) -> tuple[bytes, MemoryRegion]:
        result: tuple[bytes, MemoryRegion] = self.call("introduce")
        return result

    def add_peer(self, metadata: bytes, region: MemoryRegion) -> PeerName:
        result: PeerName = self.call("add_peer", metadata, region)
        return result

    def remove_peer(self, peer: PeerName) -> None:
        self.call("remove_peer", peer)

    def post_write(self, peer: PeerName, ops: Sequence[CopyOp], notification: bytes) -> WriteHandle:
        result: WriteHandle = self.call("post_write", peer, list(ops), notification)
        return result

    def poll(self, handle: WriteHandle) -> WriteState:
        result: WriteState = self.call("poll", handle)
        return result

    def release(self, handle: WriteHandle) -> None:
        self.call("release", handle)

    def take_notifications(self) -> list[tuple[PeerName, bytes]]:
        result: list[tuple[PeerName, bytes]] = self.call("take_notifications")
        return result

    def read(self) -> bytes:
        result: bytes = self.call("read")
        return result


def _serve(pipe: Connection) -> None:
    _, arguments = pipe.recv()
    end = make_end(*arguments)
    pipe.send(None)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(end, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            result = error
        pipe.send(result)
        if method == "close":
            return


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
