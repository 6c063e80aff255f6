"""Who may map a store, what is mapped, and what is told on the way."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from isthmus.common.config import load_config
from isthmus.common.errors import ConfigError, HandshakeError, TransferError
from isthmus.common.shared_memory import create_shared_memory, map_shared_memory
from isthmus.kvtransfer.connectors.doorman import Address, Doorman, visit
from isthmus.kvtransfer.connectors.frames import MAX_BYTES, FrameReader, frame
from isthmus.kvtransfer.connectors.shm import ShmConnector
from isthmus.kvtransfer.interface import CopyOp, MemoryRegion, WriteState
from tests.support.connector_process import ConnectorEnd, drive_until

SIZE = 1 << 16


@pytest.fixture
def ends() -> Iterator[tuple[ConnectorEnd, ConnectorEnd]]:
    pair = tuple(ConnectorEnd(ShmConnector(name), SIZE, seed=n) for n, name in enumerate("ab"))
    yield pair  # type: ignore[misc]
    for end in pair:
        end.close()


@pytest.fixture
def doorman() -> Iterator[Doorman]:
    _, fd = create_shared_memory(SIZE)
    made = Doorman(fd)
    yield made
    made.close()
    os.close(fd)


def test_what_comes_through_the_door_is_the_same_memory() -> None:
    mapping, fd = create_shared_memory(SIZE)
    made = Doorman(fd)
    connection, copy = visit(made.address, "visitor")
    theirs = map_shared_memory(copy, SIZE)
    theirs[:5] = b"hello"
    assert mapping[:5] == b"hello"
    with pytest.raises(OSError):
        os.ftruncate(copy, 1)
    connection.close()
    made.close()
    os.close(copy)
    os.close(fd)


def test_visitor_without_the_token_is_told_why_it_stays_outside(doorman: Doorman) -> None:
    with pytest.raises(HandshakeError, match="not let in: the token"):
        visit(Address(doorman.address.name, b"guessed"), "stranger")
    assert doorman.arrived.empty()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused_on_either_side(doorman: Doorman) -> None:
    """As the visitor sees it, and as the doorman does when the visitor does not look."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from isthmus.kvtransfer.connectors import doorman\n"
        "from isthmus.kvtransfer.connectors.doorman import Address, visit\n"
        "os.setuid(65534)\n"
        "if sys.argv[4] == 'blind': doorman._foreign_user = lambda _: ''\n"
        "try: visit(Address(sys.argv[2], bytes.fromhex(sys.argv[3])), 'nobody')\n"
        "except Exception as error: print(error)\n"
    )
    address = doorman.address
    for look, refusal in (
        ("looking", "user 0 there, user 65534 here"),
        ("blind", "user 65534 there, user 0 here"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, sys.path[0], address.name, address.token.hex(), look],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert refusal in done.stdout, (done.stdout, done.stderr)
    assert doorman.arrived.empty()


def test_noise_at_the_door_does_not_keep_others_out(doorman: Doorman) -> None:
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect("\0" + doorman.address.name)
            caller.sendall(noise)
    connection, fd = visit(doorman.address, "polite")
    assert doorman.arrived.get(timeout=20)[0] == "polite"
    connection.close()
    os.close(fd)


def test_callers_who_say_nothing_keep_nobody_waiting(doorman: Doorman) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for caller in silent:
        caller.connect("\0" + doorman.address.name)
    connection, fd = visit(doorman.address, "polite")
    assert doorman.arrived.get(timeout=20)[0] == "polite"
    for caller in silent:  # sent away after a while
        caller.settimeout(20)
        assert caller.recv(1) == b""
        caller.close()
    connection.close()
    os.close(fd)


def test_door_opens_again_when_files_can_be_opened_again(
    monkeypatch: pytest.MonkeyPatch, doorman: Doorman
) -> None:
    accept = socket.socket.accept
    failures = [OSError(errno.EMFILE, "too many open files"), ConnectionAbortedError()]

    def failing(listener: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    monkeypatch.setattr("isthmus.kvtransfer.connectors.doorman.GREETING_S", 20.0)
    connection, fd = visit(doorman.address, "patient")
    assert not failures
    assert doorman.arrived.get(timeout=20)[0] == "patient"
    connection.close()
    os.close(fd)


def test_closed_door_is_a_handshake_error(doorman: Doorman) -> None:
    doorman.close()
    with pytest.raises(HandshakeError, match="nobody answers"):
        visit(doorman.address, "late")


def test_other_domain_is_refused_with_both(ends: tuple[ConnectorEnd, ConnectorEnd]) -> None:
    metadata, region = ends[1].introduce()
    elsewhere = msgspec.msgpack.encode(msgspec.msgpack.decode(metadata) | {"domain": "mars"})
    with pytest.raises(HandshakeError, match=r"network namespace: .* mars at b"):
        ends[0].add_peer(elsewhere, region)


def test_peer_that_offers_more_than_it_shares_is_refused(
    ends: tuple[ConnectorEnd, ConnectorEnd],
) -> None:
    metadata, region = ends[1].introduce()
    with pytest.raises(HandshakeError, match=f"has {SIZE} bytes, not {2 * SIZE}"):
        ends[0].add_peer(metadata, MemoryRegion(region.base_address, 2 * SIZE))


def test_memory_that_could_shrink_is_refused_on_either_side() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    loose = Doorman(fd)
    ours = ConnectorEnd(ShmConnector("ours"), SIZE, seed=1)
    metadata = msgspec.msgpack.encode(
        msgspec.msgpack.decode(ours.connector.metadata())
        | {"name": "loose"}
        | {"address": {"name": loose.address.name, "token": loose.address.token}}
    )
    with pytest.raises(HandshakeError, match="may shrink"):
        ours.add_peer(metadata, MemoryRegion(0, SIZE))
    with pytest.raises(TransferError, match="sealed"):
        ShmConnector("mine").register(MemoryRegion(0, SIZE, fd=fd))
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == 0
    loose.close()
    ours.close()
    os.close(fd)


def test_private_memory_cannot_be_registered() -> None:
    with pytest.raises(TransferError, match=r"engine\.kv_memory"):
        ShmConnector("private").register(MemoryRegion(0, SIZE))


def test_notifications_that_nobody_takes_hold_their_writes_back_and_lose_none(
    ends: tuple[ConnectorEnd, ConnectorEnd],
) -> None:
    source, target = ends
    to_target = source.add_peer(*target.introduce())
    handles, payload = [], b"x" * 4096
    while not handles or source.poll(handles[-1]) is WriteState.DONE:
        handles.append(source.post_write(to_target, [CopyOp(0, 0, 1)], payload))
        assert len(handles) < 10_000
    arrived: list[bytes] = []

    def all_done() -> bool:
        arrived.extend(payload for _, payload in target.take_notifications())
        return all(source.poll(handle) is WriteState.DONE for handle in handles)

    drive_until(all_done)
    drive_until(lambda: all_done() and len(arrived) == len(handles))
    assert set(arrived) == {payload}
    for handle in handles:
        source.release(handle)


def test_open_write_fails_when_its_peer_closes(ends: tuple[ConnectorEnd, ConnectorEnd]) -> None:
    source, target = ends
    to_target = source.add_peer(*target.introduce())
    handle = source.post_write(to_target, (), b"x" * (1 << 22))  # more than a socket takes
    assert source.poll(handle) is WriteState.IN_PROGRESS
    target.take_notifications()
    target.close()
    drive_until(lambda: source.poll(handle) is WriteState.FAILED)
    source.release(handle)
    with pytest.raises(TransferError, match="has ended"):
        source.post_write(to_target, [CopyOp(0, 0, 1)], b"")


def test_store_of_a_peer_that_has_ended_is_unmapped(
    ends: tuple[ConnectorEnd, ConnectorEnd],
) -> None:
    source, target = ends
    to_target = source.add_peer(*target.introduce())
    assert isinstance(source.connector, ShmConnector)
    (kept,) = source.connector._targets.values()
    source.take_notifications()
    assert not kept.mapping.closed
    target.close()

    def is_unmapped() -> bool:
        source.take_notifications()
        return kept.mapping.closed

    drive_until(is_unmapped)
    with pytest.raises(TransferError, match="is not a peer"):
        source.post_write(to_target, [CopyOp(0, 0, 1)], b"")


def test_frames_come_whole_and_in_order_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    payloads = [bytes([n]) * size for n, size in enumerate((0, 1, 5, 70_000, 3))]
    stream = b"".join(frame(payload) for payload in payloads)
    reader, found = FrameReader(), []
    ours.setblocking(False)
    random = np.random.default_rng(0)
    while stream:
        size = int(random.integers(1, 20_000))
        theirs.sendall(stream[:size])
        stream = stream[size:]
        assert reader.read(ours)
        found += reader.take()
    assert found == payloads
    theirs.close()
    assert not reader.read(ours)
    ours.close()


def test_frame_of_an_unbelievable_length_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall((MAX_BYTES + 1).to_bytes(4, "little"))
    reader = FrameReader()
    assert not reader.read(ours)
    assert reader.take() == []
    ours.close()
    theirs.close()


@pytest.mark.parametrize("setting", [[], ["nixl", "telepathy"], "none"])
def test_unusable_settings_are_refused(setting: object) -> None:
    with pytest.raises(ConfigError, match="connector"):
        load_config(overrides={"transfer": {"connector": setting}}, environ={})
