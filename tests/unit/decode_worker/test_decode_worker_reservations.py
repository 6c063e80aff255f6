"""The line for blocks and the quarantines, over a real block pool."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.errors import ContextLengthError, IsthmusError, OutOfBlocksError
from isthmus.common.ids import InstanceId, TransferId
from isthmus.common.types import InstanceRef
from isthmus.decode_worker.prefill_client import AbortReply
from isthmus.decode_worker.prefix_give import PrefixGive
from isthmus.decode_worker.reservations import Reservations
from isthmus.engine.types import Reservation
from tests.support.engine_driver import make_prompt, make_request
from tests.support.poll import poll_until
from tests.support.tiny_model import make_tiny_core

pytestmark = pytest.mark.asyncio

SOURCE = InstanceRef(InstanceId("p"), 1, "127.0.0.1:1")


class FakeSender:
    """What a prefill instance says when it is asked."""

    def __init__(self) -> None:
        self.reply = AbortReply.UNANSWERED
        self.has_gone = False
        self.num_aborts = 0

    async def abort(self, ref: InstanceRef, transfer_id: TransferId) -> AbortReply:
        self.num_aborts += 1
        return self.reply

    async def is_gone(self, ref: InstanceRef) -> bool:
        return self.has_gone


class FakeSession:
    """A receive session that becomes quiet when it is told."""

    def __init__(self) -> None:
        self.ticket = SimpleNamespace(transfer_id=TransferId(b"t" * 16))
        self.is_cancelled = False
        self.is_resting = False
        self.quiet = asyncio.Event()

    @property
    def is_quiescent(self) -> bool:
        return self.quiet.is_set()

    def cancel(self) -> None:
        self.is_cancelled = True

    def peer_ended(self) -> None:
        self.is_resting = True

    def peer_quiesced(self) -> None:
        self.quiet.set()

    def peer_gone(self, error: IsthmusError, is_gone: bool) -> None:
        assert is_gone
        self.quiet.set()

    async def quiesced(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self.quiet.wait(), min(timeout_s, 0.02))
        except TimeoutError:
            return False
        return True


class FakeTransfers:
    def __init__(self, session: FakeSession) -> None:
        self._session = session

    def knows(self, ref: InstanceRef) -> bool:
        return True

    async def forget(self, instance_id: InstanceId, *, is_gone: bool) -> None:
        assert is_gone
        self._session.quiet.set()


class Desk:
    """Reservations over a pool of sixteen blocks of four tokens."""

    def __init__(self, max_waiting: int = 4) -> None:
        self.core = make_tiny_core(num_blocks=17, clock=VirtualClock(10**18))
        self.sender = FakeSender()
        self.session = FakeSession()
        runtime = SimpleNamespace(
            engine=self.core,
            me=InstanceRef(InstanceId("d"), 1, ""),
            transfers=FakeTransfers(self.session),
            cache_changed=lambda: None,
            load=SimpleNamespace(changed=lambda: None),
        )
        self.line = Reservations(runtime, self.sender, max_waiting)  # type: ignore[arg-type]

    async def acquire(self, name: str, num_tokens: int) -> Reservation:
        salt = sum(map(ord, name))
        return await self.line.acquire(make_request(name, make_prompt(num_tokens, salt)))

    @property
    def free_blocks(self) -> int:
        return self.core.load().free_blocks

    def check(self) -> None:
        self.core.check_integrity()
        assert self.free_blocks == 16


async def settled(task: asyncio.Task[Reservation]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


async def test_who_waits_is_served_in_turn_and_a_large_one_is_not_overtaken() -> None:
    desk = Desk()
    first = await desk.acquire("a", 40)
    large = asyncio.create_task(desk.acquire("b", 50))
    await asyncio.sleep(0)
    small = asyncio.create_task(desk.acquire("c", 4))
    assert not await settled(large)
    assert not await settled(small)
    assert (desk.line.waiting().waiting_seqs, desk.line.waiting().waiting_tokens) == (2, 54)
    desk.line.give_back(first)
    desk.line.give_back(await large)
    desk.line.give_back(await small)
    desk.check()


async def test_who_gives_up_leaves_the_line_and_frees_the_way() -> None:
    desk = Desk()
    first = await desk.acquire("a", 40)
    large = asyncio.create_task(desk.acquire("b", 50))
    await asyncio.sleep(0)
    small = asyncio.create_task(desk.acquire("c", 4))
    await asyncio.sleep(0)
    large.cancel()
    desk.line.give_back(await asyncio.wait_for(small, 60))
    assert desk.line.waiting().waiting_seqs == 0
    desk.line.give_back(first)
    desk.check()


async def test_blocks_granted_to_someone_who_has_just_left_are_not_lost() -> None:
    desk = Desk()
    first = await desk.acquire("a", 60)
    other = asyncio.create_task(desk.acquire("b", 60))
    await asyncio.sleep(0)
    desk.line.give_back(first)  # grants to b …
    other.cancel()  # … which is cancelled before it can take them
    await asyncio.gather(other, return_exceptions=True)
    desk.check()


async def test_a_full_line_and_a_request_that_never_fits_are_refused() -> None:
    desk = Desk(max_waiting=1)
    first = await desk.acquire("a", 60)
    waiting = asyncio.create_task(desk.acquire("b", 60))
    await asyncio.sleep(0)
    with pytest.raises(OutOfBlocksError, match="wait for KV blocks"):
        await desk.acquire("c", 4)
    with pytest.raises(ContextLengthError):
        await Desk().acquire("d", 4000)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    desk.line.give_back(first)
    desk.check()


async def retire(desk: Desk) -> None:
    reservation = await desk.acquire("a", 40)
    nothing_given = PrefixGive(None, reservation)  # type: ignore[arg-type]
    desk.line.retire(reservation, desk.session, SOURCE, nothing_given)  # type: ignore[arg-type]


async def test_blocks_of_a_bad_transfer_rest_until_the_sender_says_that_it_stopped() -> None:
    desk = Desk()
    await retire(desk)
    assert desk.session.is_cancelled
    assert desk.free_blocks == 6
    await poll_until(lambda: desk.sender.num_aborts >= 2)
    assert desk.free_blocks == 6
    desk.core.check_integrity()
    assert not desk.session.is_resting
    desk.sender.reply = AbortReply.QUIET
    await poll_until(lambda: desk.line.num_quarantined == 0)
    desk.check()


async def test_blocks_rest_from_when_the_sender_says_that_it_posts_no_more() -> None:
    desk = Desk()
    desk.sender.reply = AbortReply.ENDED
    await retire(desk)
    await poll_until(lambda: desk.session.is_resting)
    assert desk.line.num_quarantined == 1
    desk.session.quiet.set()
    await poll_until(lambda: desk.line.num_quarantined == 0)
    desk.check()


async def test_a_sender_that_is_gone_is_proof_enough() -> None:
    desk = Desk()
    desk.sender.has_gone = True
    await retire(desk)
    await poll_until(lambda: desk.line.num_quarantined == 0)
    desk.check()


async def test_a_silent_sender_is_waited_for_until_the_session_s_own_rest_is_over() -> None:
    desk = Desk()
    await retire(desk)
    waiting = asyncio.create_task(desk.acquire("b", 50))
    assert not await settled(waiting)
    desk.session.quiet.set()
    desk.line.give_back(await asyncio.wait_for(waiting, 5))
    desk.check()


async def test_a_quiet_session_needs_no_quarantine() -> None:
    desk = Desk()
    desk.session.quiet.set()
    await retire(desk)
    assert desk.line.num_quarantined == 0
    assert desk.sender.num_aborts == 0
    desk.check()
