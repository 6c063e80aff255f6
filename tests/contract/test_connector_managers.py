"""Two managers in two processes, one of which dies or stops: nothing hangs, nothing is taken for
complete, and target blocks come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import BlockId, InstanceId, RequestId, new_transfer_id
from isthmus.common.transfer import Checksum, TransferTicket
from isthmus.common.types import InstanceRef
from tests.support.connector_process import drive_until
from tests.support.optional_packages import needs_ucxx
from tests.support.transfer_process import LAYOUT, NUM_BLOCKS, TransferProcess

pytestmark = pytest.mark.fault

TARGET = [BlockId(block) for block in range(NUM_BLOCKS - 1, 0, -2)]  # 256 blocks, 16 MiB
SOURCE = [BlockId(block) for block in range(len(TARGET))]

Pair = tuple[TransferProcess, TransferProcess]
CMA = pytest.param("nixl", marks=pytest.mark.nixl)
TCP = pytest.param("nixl-tcp", marks=pytest.mark.nixl)
UCX = pytest.param("ucx", marks=needs_ucxx)
over_every_connector = pytest.mark.parametrize("kind", ["shm", CMA, TCP, UCX])
over_waiting_connectors = pytest.mark.parametrize(
    "kind", [TCP, UCX]
)  # which need both ends to drive


@pytest.fixture
def start() -> Iterator[Callable[[str], Pair]]:
    processes: list[TransferProcess] = []

    def start_pair(kind: str) -> Pair:
        connector, _, tls = kind.partition("-")
        for number, name in enumerate(("prefill-0", "decode-0")):
            ref = InstanceRef(InstanceId(name), number + 1, "127.0.0.1:1")
            processes.append(TransferProcess(ref, 200, tls, connector))  # type: ignore[arg-type]
        prefill, decode = processes
        meet(prefill, decode)
        return prefill, decode

    yield start_pair
    for process in processes:
        process.close()


def meet(prefill: TransferProcess, decode: TransferProcess) -> None:
    """Changes nothing where neither has dropped the other."""
    decode.call("complete", prefill.call("answer", decode.offer))


def open_both(prefill: TransferProcess, decode: TransferProcess, timeout_ms: int) -> TransferTicket:
    ticket = TransferTicket(
        transfer_id=new_transfer_id(),
        request_id=RequestId("r"),
        source=prefill.ref,
        target=decode.ref,
        first_block=0,
        target_block_ids=tuple(TARGET),
        num_tokens=len(TARGET) * LAYOUT.block_size,
        layout_hash=LAYOUT.compat_hash,
        deadline_ns=time.time_ns() + timeout_ms * NS_PER_MS,
        checksum=Checksum.XXH3,
    )
    decode.call("open_receive", ticket)
    prefill.call("open_send", ticket)
    return ticket


def push_all(prefill: TransferProcess, ticket: TransferTicket, chunk: int = 64) -> None:
    for first in range(0, len(SOURCE), chunk):
        ids = SOURCE[first : first + chunk]
        prefill.call("push", ticket.transfer_id, first, ids, first + chunk >= len(SOURCE))


def wait_for(process: TransferProcess, ticket: TransferTicket, *states: str) -> tuple[str, str]:
    """The state it ends in and its error's name, once nothing can land any more."""
    drive_until(lambda: process.status(ticket.transfer_id)[0] in states, timeout_s=20)
    drive_until(lambda: process.status(ticket.transfer_id)[2], timeout_s=20)
    return process.status(ticket.transfer_id)[:2]


def transfer(prefill: TransferProcess, decode: TransferProcess) -> None:
    ticket = open_both(prefill, decode, timeout_ms=20_000)
    push_all(prefill, ticket)
    assert wait_for(decode, ticket, "complete", "expired", "failed")[0] == "complete"
    assert wait_for(prefill, ticket, "done", "expired", "failed")[0] == "done"
    assert decode.call("read", TARGET) == prefill.call("read", SOURCE)


@over_every_connector
def test_blocks_arrive(start: Callable[[str], Pair], kind: str) -> None:
    prefill, decode = start(kind)
    for _ in range(3):
        transfer(prefill, decode)
    prefill.close()
    decode.close()
    assert (prefill.returncode, decode.returncode) == (0, 0)


@over_every_connector
def test_killed_sender_ends_at_the_deadline_and_frees_the_blocks(
    start: Callable[[str], Pair], kind: str
) -> None:
    prefill, decode = start(kind)
    ticket = open_both(prefill, decode, timeout_ms=1500)
    prefill.call("push", ticket.transfer_id, 0, SOURCE[:64], False)
    prefill.kill()
    assert wait_for(decode, ticket, "expired") == ("expired", "TransferTimeoutError")


@over_waiting_connectors
def test_killed_sender_that_is_reported_fails_at_once(
    start: Callable[[str], Pair], kind: str
) -> None:
    prefill, decode = start(kind)
    ticket = open_both(prefill, decode, timeout_ms=60_000)
    prefill.call("push", ticket.transfer_id, 0, SOURCE[:64], False)
    prefill.kill()
    decode.call("forget", prefill.ref.instance_id, True)
    assert wait_for(decode, ticket, "failed") == ("failed", "InstanceLostError")


@over_every_connector
def test_killed_receiver_fails_the_sender_or_its_deadline_does(
    start: Callable[[str], Pair], kind: str
) -> None:
    prefill, decode = start(kind)
    transfer(prefill, decode)
    ticket = open_both(prefill, decode, timeout_ms=3000)
    decode.kill()
    push_all(prefill, ticket, chunk=len(SOURCE))
    drive_until(lambda: prefill.status(ticket.transfer_id)[0] in ("failed", "expired"), 20)
    prefill.call("forget", decode.ref.instance_id, True)
    assert wait_for(prefill, ticket, "failed", "expired")[1] in (
        "TransferError",
        "TransferTimeoutError",
    )


@over_waiting_connectors
def test_stopped_receiver_expires_on_both_sides_and_the_pair_works_again(
    start: Callable[[str], Pair], kind: str
) -> None:
    prefill, decode = start(kind)
    transfer(prefill, decode)
    ticket = open_both(prefill, decode, timeout_ms=1500)
    decode.send_signal(signal.SIGSTOP)
    push_all(prefill, ticket)
    drive_until(lambda: prefill.status(ticket.transfer_id)[0] == "expired", timeout_s=20)
    decode.send_signal(signal.SIGCONT)
    assert wait_for(decode, ticket, "expired") == ("expired", "TransferTimeoutError")
    assert wait_for(prefill, ticket, "expired") == ("expired", "TransferTimeoutError")
    meet(prefill, decode)  # a peer that had stopped for long has been dropped
    transfer(prefill, decode)


@over_waiting_connectors
def test_stopped_sender_expires_at_the_receiver_and_posts_nothing_when_it_goes_on(
    start: Callable[[str], Pair], kind: str
) -> None:
    prefill, decode = start(kind)
    transfer(prefill, decode)
    ticket = open_both(prefill, decode, timeout_ms=1500)
    prefill.send_signal(signal.SIGSTOP)
    assert wait_for(decode, ticket, "expired") == ("expired", "TransferTimeoutError")
    before = decode.call("read", TARGET)
    prefill.send_signal(signal.SIGCONT)
    drive_until(lambda: prefill.status(ticket.transfer_id)[0] == "expired", timeout_s=20)
    with pytest.raises(Exception, match="deadline"):
        push_all(prefill, ticket)
    assert decode.call("read", TARGET) == before
    transfer(prefill, decode)
