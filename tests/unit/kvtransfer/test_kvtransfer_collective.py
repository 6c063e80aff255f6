"""The two ends of a collective link, against groups and memory that a test can hold up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from isthmus.kvtransfer.connectors import collective_links as links
from isthmus.kvtransfer.connectors.collective import CollectiveConnector
from isthmus.kvtransfer.connectors.collective_memory import HostMemory
from isthmus.kvtransfer.copies import Copies, Rows
from isthmus.kvtransfer.interface import CopyOp, MemoryRegion, WriteState
from tests.support.connector_process import ConnectorEnd, drive_until
from tests.support.ipv6 import needs_ipv6

PIECE = 4 * 2**20
SIZE = 3 * PIECE
TIMEOUT_S = 20.0


class Done:
    def wait(self) -> bool:
        return True


class Group:
    """Its operations end at once; the test hears of each."""

    def __init__(self, on_send: Callable[[], None]) -> None:
        self._on_send = on_send

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Done:
        self._on_send()
        return Done()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Done:
        return Done()


class Memory(HostMemory):
    def __init__(self) -> None:
        self.array = np.zeros(SIZE, dtype=np.uint8)
        super().__init__(MemoryRegion(self.array.ctypes.data, SIZE))
        self.num_packed = 0
        self.num_landed = 0
        self.settling = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def settle(self, timeout_s: float) -> None:
        self.settling.set()
        assert self.gate.wait(TIMEOUT_S)

    def pack(self, rows: Rows) -> torch.Tensor:
        self.num_packed += 1
        return super().pack(rows)

    def unpack(self, packed: torch.Tensor, rows: Rows) -> None:
        self.num_landed += 1
        super().unpack(packed, rows)


def receiver(memory: Memory) -> links.Receiver:
    return links.Receiver(memory, b"token", None, "127.0.0.1")  # type: ignore[arg-type]


def group_of(monkeypatch: pytest.MonkeyPatch, on_send: Callable[[], None]) -> None:
    monkeypatch.setattr(links, "_join_store", lambda host, port: None)
    monkeypatch.setattr(links, "_make_group", lambda *_: Group(on_send))


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def test_nothing_is_read_for_a_link_that_was_closed(
    monkeypatch: pytest.MonkeyPatch, connected: tuple[socket.socket, socket.socket]
) -> None:
    """Between two pieces of a write: its blocks may have been given to somebody else."""
    first_sent, closed = threading.Event(), threading.Event()

    def on_send() -> None:
        first_sent.set()
        assert closed.wait(TIMEOUT_S)

    group_of(monkeypatch, on_send)
    memory = Memory()
    link = links.Outgoing(connected[0], receiver(memory), "me", b"token", ("", 0))
    write = link.post(Copies.of([CopyOp(0, 0, SIZE)]), b"n")
    assert first_sent.wait(TIMEOUT_S)
    link.close()
    closed.set()
    assert write.state is WriteState.FAILED
    assert link._thread is not None
    link._thread.join(TIMEOUT_S)
    assert not link._thread.is_alive()
    assert memory.num_packed == 1


def test_a_writer_that_stops_holds_up_its_own_link_alone(
    monkeypatch: pytest.MonkeyPatch, connected: tuple[socket.socket, socket.socket]
) -> None:
    """While a link waits for bytes, others land theirs and it can be shut."""
    group_of(monkeypatch, lambda: None)
    ours, theirs = connected
    memory = Memory()
    mine = receiver(memory)
    stopped = links.Outgoing(ours, mine, "me", b"token", ("", 0))
    incoming = links.Incoming(theirs, mine)
    memory.gate.clear()
    rows = Copies.of([CopyOp(0, 0, SIZE)]).rows
    for message in (links._Group("g"), links._Header(rows.astype("<i8").tobytes(), b"n")):
        stopped._send(message)
    assert memory.settling.wait(TIMEOUT_S)
    shut = threading.Thread(target=incoming.shut, daemon=True)
    shut.start()
    shut.join(TIMEOUT_S)
    assert not shut.is_alive()
    memory.gate.set()
    drive_until(lambda: incoming.has_ended, TIMEOUT_S)
    assert memory.num_landed == 0
    assert not mine.arrived
    stopped.close()


def test_whoever_does_not_say_who_it_is_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that has nothing to write yet stays."""
    monkeypatch.setattr(links, "GREETING_S", 0.0)
    ends = [ConnectorEnd(CollectiveConnector(name, "127.0.0.1"), 4096, seed=1) for name in "ab"]
    source, target = ends
    assert isinstance(target.connector, CollectiveConnector)
    listener = target.connector._listener
    assert listener is not None
    with socket.create_connection(listener.getsockname(), TIMEOUT_S) as stray:
        to_target = source.add_peer(*target.introduce())
        drive_until(lambda: target.take_notifications() == [] and _has_ended(stray), TIMEOUT_S)
    target.take_notifications()
    handle = source.post_write(to_target, [CopyOp(0, 0, 4096)], b"n")
    arrived: list[bytes] = []

    def is_there() -> bool:
        arrived.extend(payload for _, payload in target.take_notifications())
        return source.poll(handle) is WriteState.DONE and arrived == [b"n"]

    drive_until(is_there, TIMEOUT_S)
    source.release(handle)
    for end in ends:
        end.close()


def _has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@needs_ipv6
def test_two_ends_meet_over_ipv6() -> None:
    ends = [ConnectorEnd(CollectiveConnector(name, "::1"), 4096, seed=2) for name in "ab"]
    try:
        peer = ends[0].add_peer(*ends[1].introduce())
        handle = ends[0].post_write(peer, [CopyOp(0, 1024, 512)], b"n")
        arrived: list[bytes] = []

        def has_ended() -> bool:
            """Both ends must be driven, and the notification may come after the write's end."""
            arrived.extend(payload for _, payload in ends[1].take_notifications())
            return ends[0].poll(handle) is WriteState.DONE and bool(arrived)

        drive_until(has_ended)
        assert arrived == [b"n"]
        assert ends[1].read()[1024:1536] == ends[0].read()[:512]
    finally:
        for end in ends:
            end.close()
