"""A peer that dies, stops or is removed while it is written to: two processes, real signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from isthmus.common.errors import TransferError
from isthmus.kvtransfer.interface import CopyOp, PeerName, WriteHandle, WriteState
from tests.support.connector_process import (
    ConnectorEnd,
    ConnectorProcess,
    drive_until,
    make_end,
)
from tests.support.optional_packages import needs_ucxx

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

BLOCK = 2**20
NUM_BLOCKS = 64
EVERYTHING = [CopyOp(0, 0, NUM_BLOCKS * BLOCK)]

Source = ConnectorProcess | ConnectorEnd
MakePair = Callable[[str], tuple[Source, ConnectorProcess, PeerName]]
CMA = pytest.param("nixl", marks=pytest.mark.nixl)
TCP = pytest.param("nixl-tcp", marks=pytest.mark.nixl)
UCX = pytest.param("ucx", marks=needs_ucxx)
EVERY_KIND = ["shm", CMA, TCP, UCX]
WAITING_KINDS = ["collective", TCP, UCX]
"""Whose writes need the other end to make progress."""


def start(kind: str, name: str, seed: int) -> ConnectorProcess:
    connector, _, tls = kind.partition("-")
    return ConnectorProcess(connector, name, NUM_BLOCKS * BLOCK, seed, BLOCK, tls)


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    ends: list[Source] = []

    def make(kind: str) -> tuple[Source, ConnectorProcess, PeerName]:
        # A process that loads torch takes seconds of CPU time: only the end that suffers is one.
        source = (
            make_end(kind, "source@1", NUM_BLOCKS * BLOCK, 0, BLOCK)
            if kind == "collective"
            else start(kind, "source@1", 0)
        )
        target = start(kind, "target@1", 1)
        ends.extend((source, target))
        to_target = source.add_peer(*target.introduce())
        target.add_peer(*source.introduce())
        handle = source.post_write(to_target, [CopyOp(0, 0, BLOCK)], b"connected")
        arrived: list[tuple[PeerName, bytes]] = []

        def connected() -> bool:
            arrived.extend(target.take_notifications())
            return source.poll(handle) is WriteState.DONE and bool(arrived)

        drive_until(connected)
        source.release(handle)
        return source, target, to_target

    yield make
    for end in ends:
        end.close()


def states_until_ended(source: Source, handle: WriteHandle, timeout_s: float) -> list[WriteState]:
    """States seen, without repeats; stops at the first that is final or at the timeout."""
    seen = [source.poll(handle)]
    deadline = time.monotonic() + timeout_s
    while seen[-1] is WriteState.IN_PROGRESS and time.monotonic() < deadline:
        if (state := source.poll(handle)) is not seen[-1]:
            seen.append(state)
    return seen


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_write_to_a_killed_peer_fails(make_pair: MakePair, kind: str) -> None:
    source, target, to_target = make_pair(kind)
    target.kill()
    try:
        handle = source.post_write(to_target, EVERYTHING, b"x")
    except TransferError:
        return  # refused at once is as good
    assert states_until_ended(source, handle, timeout_s=10)[-1] is WriteState.FAILED
    source.release(handle)


@pytest.mark.parametrize("kind", WAITING_KINDS)
def test_peer_killed_in_the_middle_of_a_write_fails_it(make_pair: MakePair, kind: str) -> None:
    source, target, to_target = make_pair(kind)
    target.send_signal(signal.SIGSTOP)
    handle = source.post_write(to_target, EVERYTHING, b"x")
    assert source.poll(handle) is WriteState.IN_PROGRESS
    target.kill()
    assert states_until_ended(source, handle, timeout_s=10)[-1] is WriteState.FAILED
    source.release(handle)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_peer_killed_amid_many_writes_fails_one_and_its_successor_takes_more(
    make_pair: MakePair, kind: str
) -> None:
    """Nothing of the writer ends with its peer, and what the dead one mapped can be read on."""
    source, target, to_target = make_pair(kind)
    number = 0
    while number < 1000:
        if number == 3:
            target.kill()
        try:
            handle = source.post_write(to_target, EVERYTHING[:1], b"%d" % number)
        except TransferError:
            break
        if number < 3:
            drive_to_done(source, target, handle)
        elif states_until_ended(source, handle, timeout_s=20)[-1] is WriteState.FAILED:
            source.release(handle)
            break
        else:
            source.release(handle)
        number += 1
    assert 3 <= number < 1000
    source.remove_peer(to_target)
    successor = start(kind, "target@2", 7)
    try:
        handle = source.post_write(source.add_peer(*successor.introduce()), EVERYTHING, b"again")
        drive_to_done(source, successor, handle)
        assert successor.read() == source.read()
    finally:
        successor.close()


def drive_to_done(source: Source, target: ConnectorProcess, handle: WriteHandle) -> None:
    def done() -> bool:
        target.take_notifications()
        return source.poll(handle) is WriteState.DONE

    drive_until(done, timeout_s=20)
    source.release(handle)


def test_memory_of_a_stopped_peer_is_written_all_the_same(make_pair: MakePair) -> None:
    source, target, to_target = make_pair("shm")
    target.send_signal(signal.SIGSTOP)
    handle = source.post_write(to_target, EVERYTHING, b"there")
    assert source.poll(handle) is WriteState.DONE
    target.send_signal(signal.SIGCONT)
    assert [payload for _, payload in target.take_notifications()] == [b"there"]
    assert target.read() == source.read()


def test_killed_processes_leave_no_shared_memory_behind(make_pair: MakePair) -> None:
    source, target, _ = make_pair("shm")
    assert isinstance(source, ConnectorProcess)
    names = [
        msgspec.msgpack.decode(end.introduce()[0])["address"]["name"] for end in (source, target)
    ]
    assert all(name in Path("/proc/net/unix").read_text() for name in names)
    source.kill()
    target.kill()
    assert not any(name in Path("/proc/net/unix").read_text() for name in names)
    assert not list(Path("/dev/shm").glob("*isthmus*"))


@pytest.mark.parametrize("kind", WAITING_KINDS)
def test_stopped_peer_keeps_a_write_in_progress_until_it_goes_on(
    make_pair: MakePair, kind: str
) -> None:
    source, target, to_target = make_pair(kind)
    target.send_signal(signal.SIGSTOP)
    handle = source.post_write(to_target, EVERYTHING, b"late")
    assert states_until_ended(source, handle, timeout_s=1) == [WriteState.IN_PROGRESS]
    target.send_signal(signal.SIGCONT)
    arrived: list[tuple[PeerName, bytes]] = []

    def ended() -> bool:
        arrived.extend(target.take_notifications())
        return source.poll(handle) is WriteState.DONE and bool(arrived)

    drive_until(ended)
    assert [payload for _, payload in arrived] == [b"late"]
    assert target.read() == source.read()
    source.release(handle)


@pytest.mark.parametrize("kind", [TCP, UCX])
def test_removing_a_stopped_peer_fails_its_write_and_leaves_the_connector_usable(
    make_pair: MakePair, kind: str
) -> None:
    source, target, to_target = make_pair(kind)
    target.send_signal(signal.SIGSTOP)
    handle = source.post_write(to_target, EVERYTHING, b"x")
    assert source.poll(handle) is WriteState.IN_PROGRESS
    source.remove_peer(to_target)
    assert source.poll(handle) is WriteState.FAILED
    source.release(handle)
    other = start(kind, "other@1", 5)
    try:
        to_other = source.add_peer(*other.introduce())
        fresh = source.post_write(to_other, EVERYTHING, b"y")

        def done() -> bool:
            other.take_notifications()
            return source.poll(fresh) is WriteState.DONE

        drive_until(done)
        assert other.read() == source.read()
        source.release(fresh)
    finally:
        target.send_signal(signal.SIGCONT)
        other.close()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_processes_end_in_order(make_pair: MakePair, kind: str) -> None:
    source, target, _ = make_pair(kind)
    assert isinstance(source, ConnectorProcess)
    source.close()
    target.close()
    assert (source.returncode, target.returncode) == (0, 0)
