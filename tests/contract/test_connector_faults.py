"""A peer that dies, stops or is removed while NIXL writes to it: two processes, real signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from isthmus.common.errors import TransferError
from isthmus.kvtransfer.interface import CopyOp, PeerName, WriteHandle, WriteState
from tests.support.connector_process import ConnectorProcess, drive_until

pytestmark = [pytest.mark.nixl, pytest.mark.fault]

BLOCK = 2**20
NUM_BLOCKS = 64
EVERYTHING = [CopyOp(0, 0, NUM_BLOCKS * BLOCK)]

MakePair = Callable[[str], tuple[ConnectorProcess, ConnectorProcess, PeerName]]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    ends: list[ConnectorProcess] = []

    def make(tls: str) -> tuple[ConnectorProcess, ConnectorProcess, PeerName]:
        source, target = (
            ConnectorProcess("nixl", name, NUM_BLOCKS * BLOCK, seed, BLOCK, tls)
            for seed, name in enumerate(("source@1", "target@1"))
        )
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


def states_until_ended(
    source: ConnectorProcess, handle: WriteHandle, timeout_s: float
) -> list[WriteState]:
    """States seen, without repeats; stops at the first that is final or at the timeout."""
    seen = [source.poll(handle)]
    deadline = time.monotonic() + timeout_s
    while seen[-1] is WriteState.IN_PROGRESS and time.monotonic() < deadline:
        if (state := source.poll(handle)) is not seen[-1]:
            seen.append(state)
    return seen


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])
def test_write_to_a_killed_peer_fails(make_pair: MakePair, tls: str) -> None:
    source, target, to_target = make_pair(tls)
    target.kill()
    try:
        handle = source.post_write(to_target, EVERYTHING, b"x")
    except TransferError:
        return  # refused at once is as good
    assert states_until_ended(source, handle, timeout_s=10)[-1] is WriteState.FAILED
    source.release(handle)


def test_peer_killed_in_the_middle_of_a_write_fails_it(make_pair: MakePair) -> None:
    source, target, to_target = make_pair("tcp")
    handle = source.post_write(to_target, EVERYTHING, b"x")
    target.take_notifications()
    assert source.poll(handle) is WriteState.IN_PROGRESS
    target.kill()
    assert states_until_ended(source, handle, timeout_s=10)[-1] is WriteState.FAILED
    source.release(handle)


def test_stopped_peer_keeps_a_write_in_progress_until_it_goes_on(make_pair: MakePair) -> None:
    source, target, to_target = make_pair("tcp")
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


def test_removing_a_stopped_peer_fails_its_write_and_leaves_the_connector_usable(
    make_pair: MakePair,
) -> None:
    source, target, to_target = make_pair("tcp")
    target.send_signal(signal.SIGSTOP)
    handle = source.post_write(to_target, EVERYTHING, b"x")
    assert source.poll(handle) is WriteState.IN_PROGRESS
    source.remove_peer(to_target)
    assert source.poll(handle) is WriteState.FAILED
    source.release(handle)
    other = ConnectorProcess("nixl", "other@1", NUM_BLOCKS * BLOCK, 5, BLOCK, "tcp")
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


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])
def test_processes_end_in_order(make_pair: MakePair, tls: str) -> None:
    source, target, _ = make_pair(tls)
    source.close()
    target.close()
    assert (source.returncode, target.returncode) == (0, 0)
