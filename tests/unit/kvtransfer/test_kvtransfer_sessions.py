"""Both sessions of a transfer, arrow by arrow, on virtual time with scripted faults."""

from __future__ import annotations

import asyncio

import pytest

from isthmus.common.errors import (
    CancelledError,
    InstanceLostError,
    StaleEpochError,
    TransferError,
    TransferTimeoutError,
)
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.link import WRITES_IN_WINDOW
from isthmus.kvtransfer.notification import Flags, Notification
from isthmus.kvtransfer.receive_session import (
    RECEIVE_TRANSITIONS,
    Ignored,
    Proof,
    ReceiveSession,
    ReceiveState,
)
from isthmus.kvtransfer.send_session import SEND_TRANSITIONS, SendState
from tests.support.transfer_pair import LAYOUT, TransferEnd, TransferPair, blocks, transfer_pair

pytestmark = pytest.mark.asyncio


async def ended_with(session: ReceiveSession, error: type[Exception]) -> str:
    assert not session.is_open
    with pytest.raises(error) as caught:
        await session.wait_complete()
    return str(caught.value)


def note(receive: ReceiveSession, chunk: int, first: int, count: int, **more: object) -> bytes:
    fields = {"layer_last": LAYOUT.num_layers - 1, "flags": Flags.NONE, **more}
    return Notification(
        receive.ticket.transfer_id,
        chunk,
        first_block=first,
        num_blocks=count,
        **fields,  # type: ignore[arg-type]
    ).encode()


async def tell(pair: TransferPair, payload: bytes, times: int = 1) -> None:
    """The prefill side's connector says something that its sessions would not."""
    for _ in range(times):
        pair.prefill.connector.post_write(PeerName("decode-0@1"), (), payload)
    await pair.decode.manager.sweep_once()


# --- the way that goes well --------------------------------------------------------------------


async def test_blocks_arrive_where_the_ticket_says() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([5, 9, 10, 2])
        assert (send.state, receive.state) == (SendState.CONNECTED, ReceiveState.RESERVED)
        before = pair.decode.memory.copy()
        send.push(0, blocks(3), is_last=False)
        assert send.state is SendState.STREAMING
        await pair.drive()
        assert receive.state is ReceiveState.RECEIVING
        assert not receive.is_quiescent
        send.push(1, blocks(4, 5, 20), is_last=True)
        assert send.state is SendState.DRAINING_NIC
        await pair.drive()
        await send.drained()
        await receive.wait_complete()
        assert (send.state, receive.state) == (SendState.DONE, ReceiveState.COMPLETE)
        expected = before.reshape(32, -1)
        expected[[5, 9, 10, 2]] = pair.prefill.blocks(blocks(3, 4, 5, 20))
        assert pair.decode.memory.tobytes() == expected.tobytes()
        assert send.num_bytes == receive.num_bytes == 4 * LAYOUT.block_bytes
        assert (send.num_chunks, receive.proof) == (2, Proof.ALL_ARRIVED)
        assert await send.quiesce()
        pair.assert_idle()
        ended = [("send", "done", send.num_bytes)]
        assert pair.prefill.observer.ended == ended
        assert pair.decode.observer.ended == [("receive", "complete", receive.num_bytes)]


async def test_chunks_may_arrive_out_of_order() -> None:
    async with transfer_pair("0:delay=6") as pair:
        send, receive = pair.open([0, 1])
        send.push(0, blocks(7), is_last=False)
        send.push(1, blocks(8), is_last=True)
        await pair.drive(3)
        assert receive.state is ReceiveState.RECEIVING
        await pair.drive(6)
        assert receive.state is ReceiveState.COMPLETE
        assert (pair.decode.blocks(blocks(0, 1)) == pair.prefill.blocks(blocks(7, 8))).all()


async def test_duplicate_notification_is_counted_and_changes_nothing() -> None:
    async with transfer_pair("0:duplicate") as pair:
        send, receive = pair.open([0, 1])
        send.push(0, blocks(7), is_last=False)
        await pair.drive()
        assert receive.num_bytes == LAYOUT.block_bytes
        send.push(1, blocks(8), is_last=True)
        await pair.drive()
        assert receive.state is ReceiveState.COMPLETE
        assert pair.decode.observer.ignored == [Ignored.DUPLICATE]
        assert pair.decode.manager.ignored[Ignored.DUPLICATE] == 1


async def test_long_push_is_split_into_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    window = 2 * WRITES_IN_WINDOW * LAYOUT.block_bytes
    monkeypatch.setattr("isthmus.kvtransfer.link.INITIAL_WINDOW_BYTES", window)
    async with transfer_pair() as pair:
        send, receive = pair.open(range(7))
        send.push(0, blocks(*range(10, 17)), is_last=True)
        assert send.num_chunks == 4
        await pair.drive()
        assert receive.state is ReceiveState.COMPLETE
        source = pair.prefill.blocks(blocks(*range(10, 17)))
        assert (pair.decode.blocks(blocks(*range(7))) == source).all()


async def test_expected_count_before_or_after_the_chunks_completes() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0, 1])
        receive.expect(2)
        send.push(0, blocks(1), is_last=False)
        send.push(1, blocks(2), is_last=True)
        await pair.drive()
        assert receive.state is ReceiveState.COMPLETE
        receive.expect(9)  # after the end nothing changes
        assert receive.state is ReceiveState.COMPLETE


# --- what must never be taken for complete -----------------------------------------------------


@pytest.mark.parametrize("announced", [1, 3])
async def test_count_that_contradicts_the_chunks_fails(announced: int) -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0, 1])
        receive.expect(announced)
        await tell(pair, note(receive, 0, 0, 1))
        await tell(pair, note(receive, 1, 1, 1, flags=Flags.LAST))
        assert "chunks" in await ended_with(receive, TransferError)


async def test_chunk_beyond_an_expected_count_fails_at_once() -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0, 1, 2])
        await tell(pair, note(receive, 4, 0, 1))
        receive.expect(2)
        await ended_with(receive, TransferError)


@pytest.mark.parametrize(
    ("first", "count", "more"),
    [
        (1, 2, {}),
        (2, 1, {}),
        (0, 0, {}),
        (0, 1, {"layer_first": 1, "layer_last": 0}),
        (0, 1, {"layer_last": LAYOUT.num_layers}),
    ],
    ids=["past the end", "outside", "empty", "no layers", "too many layers"],
)
async def test_chunk_outside_the_ticket_fails(first: int, count: int, more: dict[str, int]) -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0, 1])
        await tell(pair, note(receive, 0, first, count, **more))
        assert "chunk 0" in await ended_with(receive, TransferError)
        assert not receive.is_quiescent


async def test_two_chunks_over_one_block_fail() -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0, 1])
        await tell(pair, note(receive, 0, 0, 1))
        await tell(pair, note(receive, 1, 0, 2, flags=Flags.LAST))
        assert "another chunk" in await ended_with(receive, TransferError)


async def test_all_chunks_without_all_blocks_fail() -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0, 1])
        await tell(pair, note(receive, 0, 0, 1, flags=Flags.LAST))
        assert "1 blocks are in none" in await ended_with(receive, TransferError)
        assert not receive.is_quiescent


async def test_layers_of_a_block_may_come_in_pieces() -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0])
        await tell(pair, note(receive, 0, 0, 1, layer_last=0))
        assert receive.is_open
        await tell(pair, note(receive, 1, 0, 1, layer_first=1, layer_last=1, flags=Flags.LAST))
        assert receive.state is ReceiveState.COMPLETE
        assert receive.num_bytes == LAYOUT.block_bytes


async def test_notification_of_another_instance_is_foreign() -> None:
    async with transfer_pair() as pair, transfer_pair() as other:
        _, receive = pair.open([0])
        payload = note(receive, 0, 0, 1, flags=Flags.LAST)
        await pair.decode.manager._inbox.accept(0, PeerName("prefill-0@2"), payload)
        assert receive.state is ReceiveState.RESERVED
        await tell(other, payload)
        assert pair.decode.observer.ignored == [Ignored.FOREIGN]
        assert other.decode.observer.ignored == [Ignored.UNKNOWN]


async def test_noise_is_counted() -> None:
    async with transfer_pair() as pair:
        await tell(pair, b"noise")
        assert pair.decode.observer.ignored == [Ignored.MALFORMED]


async def test_lost_notification_ends_at_the_deadline() -> None:
    async with transfer_pair("1:drop") as pair:
        send, receive = pair.open([0, 1])
        send.push(0, blocks(1), is_last=False)
        send.push(1, blocks(2), is_last=True)
        await pair.drive()
        assert send.state is SendState.DONE
        assert receive.state is ReceiveState.RECEIVING
        pair.clock.advance_ms(1000)
        pair.decode.manager.expire_due()
        assert "1 of 2 blocks" in await ended_with(receive, TransferTimeoutError)


async def test_all_that_arrives_at_the_deadline_is_too_late() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0])
        send.push(0, blocks(1), is_last=True)
        await pair.prefill.manager.sweep_once()  # the bytes and the notification are there
        pair.clock.advance_ms(1000)
        await pair.decode.manager.sweep_once()
        assert receive.state is ReceiveState.EXPIRED
        assert pair.decode.observer.ignored == [Ignored.LATE]
        assert receive.proof is Proof.ALL_ARRIVED  # its blocks are free at once


# --- waiting for a prompt, and waiting for bytes -------------------------------------------------

LONG_MS = 60_000  # a request's deadline: many times the patience with a transfer (1000 ms)


async def wait_decode(pair: TransferPair, milliseconds: int) -> None:
    pair.clock.advance_ms(milliseconds)
    pair.decode.manager.expire_due()


async def test_a_prompt_may_wait_longer_than_a_transfer_may_stall() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0, 1, 2], timeout_ms=LONG_MS)
        await wait_decode(pair, 30_000)
        send.push(0, blocks(7), is_last=False)
        receive.announced(LAYOUT.block_size)
        await pair.drive()
        await wait_decode(pair, 20_000)  # the next chunk is being computed: nothing is owed
        assert receive.state is ReceiveState.RECEIVING
        send.push(1, blocks(8, 9), is_last=True)
        await pair.drive()
        await receive.wait_complete()
        pair.assert_idle()


@pytest.mark.parametrize("sign", ["announced", "last chunk", "count"])
async def test_patience_begins_with_the_first_sign_of_kv(sign: str) -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0, 1], timeout_ms=LONG_MS)
        await wait_decode(pair, 5_000)
        if sign == "announced":
            receive.announced(LAYOUT.block_size)
        elif sign == "count":
            receive.expect(2)
        else:
            await tell(pair, note(receive, 1, 1, 1, flags=Flags.LAST))
        await wait_decode(pair, 999)
        assert receive.is_open
        receive.announced(2 * LAYOUT.block_size)  # a promise is no progress
        await wait_decode(pair, 1)
        assert receive.state is ReceiveState.EXPIRED
        assert "none had come for 1000 ms" in await ended_with(receive, TransferTimeoutError)


async def test_every_chunk_renews_the_patience() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open(range(5), timeout_ms=LONG_MS)
        receive.announced(receive.ticket.num_tokens)
        for index in range(5):
            await wait_decode(pair, 900)
            send.push(index, blocks(10 + index), is_last=index == 4)
            await pair.drive()
        await receive.wait_complete()
        pair.assert_idle()


async def test_only_blocks_after_the_cached_ones_are_owed() -> None:
    async with transfer_pair() as pair:
        ticket = pair.ticket([5, 6], first_block=3, timeout_ms=LONG_MS)
        receive = pair.decode.manager.open_receive(ticket)
        receive.announced(3 * LAYOUT.block_size)  # all of it was here before
        await wait_decode(pair, 5_000)
        assert receive.is_open
        receive.announced(4 * LAYOUT.block_size)
        await wait_decode(pair, 1_000)
        assert receive.state is ReceiveState.EXPIRED


async def test_a_stalled_transfer_rests_from_when_its_sender_has_ended() -> None:
    """Long before the ticket's deadline; without the sender's word it would wait for that."""
    async with transfer_pair("0:hang") as pair:
        send, receive = pair.open([0], timeout_ms=LONG_MS)
        send.push(0, blocks(1), is_last=True)
        receive.announced(receive.ticket.num_tokens)
        await pair.drive()
        await wait_decode(pair, 1_000)
        assert receive.state is ReceiveState.EXPIRED
        await pair.rest(1_000)
        assert not receive.is_quiescent
        send.cancel()
        receive.peer_ended()
        await pair.rest(200)
        assert not receive.is_quiescent
        await pair.rest(200)
        assert receive.proof is Proof.QUARANTINE_PASSED
        assert not await send.quiesce()  # and its source blocks are kept no longer than that
        await pair.prefill.manager.forget(pair.decode.ref.instance_id)
        await pair.drive()


# --- the sender's bad ends ---------------------------------------------------------------------


async def test_refused_write_fails_both_sides_and_is_quiet() -> None:
    async with transfer_pair("1:refuse") as pair:
        send, receive = pair.open([0, 1, 2])
        send.push(0, blocks(1), is_last=False)
        send.push(1, blocks(2), is_last=False)
        await pair.drive()
        assert send.state is SendState.FAILED
        with pytest.raises(TransferError, match="refused by script"):
            await send.drained()
        with pytest.raises(TransferError, match="refused by script"):
            send.push(2, blocks(3), is_last=True)
        assert await send.quiesce()
        assert "gave up" in await ended_with(receive, TransferError)
        assert receive.proof is Proof.SENDER_CONFIRMED
        pair.assert_idle()


async def test_half_done_write_fails_both_sides_without_proof() -> None:
    async with transfer_pair("0:fail") as pair:
        send, receive = pair.open([0, 5])
        send.push(0, blocks(1, 9), is_last=True)
        await pair.drive()
        assert send.state is SendState.FAILED
        assert not await send.quiesce()
        await ended_with(receive, TransferError)
        assert not receive.is_quiescent
        await pair.rest(200)
        assert not receive.is_quiescent  # rest began when the sender said that it posts no more
        await pair.rest(200)
        assert receive.proof is Proof.QUARANTINE_PASSED
        pair.assert_idle()


async def test_cancelled_sender_posts_nothing_more_and_says_so() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0, 1])
        before = pair.decode.memory.copy()
        send.push(0, blocks(1), is_last=False)
        send.cancel()
        await pair.drive()
        assert send.state is SendState.CANCELLED
        assert await send.quiesce()
        with pytest.raises(CancelledError):
            await send.drained()
        assert (pair.decode.memory == before).all()
        await ended_with(receive, TransferError)
        assert receive.proof is Proof.SENDER_CONFIRMED
        pair.assert_idle()


async def test_cancelled_sender_is_quiet_only_after_its_posted_write() -> None:
    async with transfer_pair("0:delay=8") as pair:
        send, receive = pair.open([0, 1])
        send.push(0, blocks(1), is_last=False)
        await pair.drive(2)
        send.cancel()
        quiesce = asyncio.ensure_future(send.quiesce())
        await pair.drive(2)
        assert not send.is_quiet
        assert not quiesce.done()
        assert receive.is_open
        await pair.drive(6)
        assert await quiesce
        assert receive.proof is Proof.SENDER_CONFIRMED
        pair.assert_idle()


async def test_sender_never_posts_after_the_deadline() -> None:
    async with transfer_pair() as pair:
        send, _ = pair.open([0])
        before = pair.decode.memory.copy()
        send.push(0, blocks(1), is_last=True)
        pair.clock.advance_ms(1000)
        await pair.drive()
        assert send.state is SendState.EXPIRED
        assert (pair.decode.memory == before).all()
        with pytest.raises(TransferTimeoutError):
            await send.drained()


async def test_hanging_write_expires_and_gives_no_proof() -> None:
    async with transfer_pair("0:hang") as pair:
        send, receive = pair.open([0])
        send.push(0, blocks(1), is_last=True)
        await pair.drive()
        pair.clock.advance_ms(1000)
        await pair.drive()
        assert (send.state, receive.state) == (SendState.EXPIRED, ReceiveState.EXPIRED)
        pair.clock.advance_ms(300)
        assert not await send.quiesce()
        assert pair.prefill.manager.sessions_by_state() == {"send:expired": 1}
        await pair.prefill.manager.forget(pair.decode.ref.instance_id)
        await pair.drive()
        assert pair.prefill.manager.sessions_by_state() == {}
        await pair.rest(400)
        pair.assert_idle()


@pytest.mark.parametrize(
    ("first", "block_ids", "is_last"),
    [
        (1, (1,), False),
        (0, (), False),
        (0, (1, 2, 3), True),
        (0, (1,), True),
        (0, (1, 2), False),
        (0, (32,), False),
        (0, (-1,), False),
    ],
    ids=["gap", "empty", "too many", "last too soon", "last not said", "no such block", "negative"],
)
async def test_push_that_breaks_the_order_is_a_bug(
    first: int, block_ids: tuple[int, ...], is_last: bool
) -> None:
    async with transfer_pair() as pair:
        send, _ = pair.open([0, 1])
        with pytest.raises(ValueError):
            send.push(first, blocks(*block_ids), is_last=is_last)
        assert send.num_chunks == 0


async def test_push_after_the_last_is_a_bug() -> None:
    async with transfer_pair() as pair:
        send, _ = pair.open([0])
        send.push(0, blocks(1), is_last=True)
        with pytest.raises(ValueError):
            send.push(1, blocks(2), is_last=True)
        await pair.drive()
        with pytest.raises(ValueError):
            send.push(1, blocks(2), is_last=True)


# --- the receiver's bad ends and quiescence ----------------------------------------------------


async def test_cancelled_receiver_keeps_its_blocks_until_the_sender_confirms() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0, 1])
        send.push(0, blocks(1), is_last=False)
        await pair.drive()
        receive.cancel()
        await ended_with(receive, CancelledError)
        assert not await receive.quiesced(timeout_s=0)
        assert pair.decode.manager.sessions_by_state() == {"receive:cancelled": 1}
        receive.peer_quiesced()
        assert await receive.quiesced(timeout_s=0)
        pair.check_integrity()
        assert pair.decode.manager.sessions_by_state() == {}


async def test_cancelled_receiver_is_free_when_the_rest_arrives_after_all() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0, 1])
        receive.cancel()
        send.push(0, blocks(1, 2), is_last=True)
        await pair.drive()
        assert receive.state is ReceiveState.CANCELLED
        assert receive.proof is Proof.ALL_ARRIVED
        pair.assert_idle()


async def test_rest_counts_only_time_in_which_the_connector_was_driven() -> None:
    """A receiver that was stopped wakes up long after the deadline: nothing has drained."""
    async with transfer_pair("0:hang") as pair:
        send, receive = pair.open([0])
        send.push(0, blocks(1), is_last=True)
        await pair.drive()
        pair.clock.advance_ms(60_000)
        await pair.decode.manager.sweep_once()
        assert receive.state is ReceiveState.EXPIRED
        pair.clock.advance_ms(60_000)
        await pair.decode.manager.sweep_once()
        assert not receive.is_quiescent
        await pair.rest(300)
        assert receive.proof is Proof.QUARANTINE_PASSED


async def test_lost_peer_of_unknown_fate_rests_from_the_deadline_on() -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0])
        await pair.decode.manager.forget(pair.prefill.ref.instance_id)
        await ended_with(receive, InstanceLostError)
        await pair.rest(900)
        assert not receive.is_quiescent
        await pair.rest(500)
        assert receive.proof is Proof.QUARANTINE_PASSED


async def test_lost_peer_whose_process_is_gone_rests_at_once() -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0])
        await pair.decode.manager.forget(pair.prefill.ref.instance_id, is_gone=True)
        await ended_with(receive, InstanceLostError)
        assert not receive.is_quiescent
        await pair.rest(400)
        assert receive.proof is Proof.QUARANTINE_PASSED


async def test_a_newer_epoch_is_no_proof_that_the_older_one_writes_no_more() -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0])
        reborn = TransferEnd("prefill-0", 2, pair.fabric, pair.clock)
        await pair.decode.manager.answer(reborn.manager.offer())
        await ended_with(receive, StaleEpochError)
        await pair.rest(900)
        assert not receive.is_quiescent
        await pair.rest(500)
        assert receive.proof is Proof.QUARANTINE_PASSED
        await reborn.manager.close()


async def test_confirmation_before_the_end_frees_the_blocks_at_the_end() -> None:
    async with transfer_pair() as pair:
        _, receive = pair.open([0])
        receive.peer_quiesced()
        assert receive.is_open
        receive.fail(TransferError("prefill failed"))
        assert receive.is_quiescent
        assert pair.decode.manager.sessions_by_state() == {}


async def test_first_end_wins() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0])
        receive.fail(TransferError("first"))
        receive.cancel()
        receive.expire()
        assert await ended_with(receive, TransferError) == "first"
        send.cancel()
        send.fail(TransferError("second"))
        assert send.state is SendState.CANCELLED


async def test_every_state_is_in_its_table() -> None:
    assert set(SEND_TRANSITIONS.table) == set(SendState)
    assert set(RECEIVE_TRANSITIONS.table) == set(ReceiveState)
