"""Peers, tickets, epochs, timers and the poller of a TransferManager."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from isthmus.common.clock import SystemClock, VirtualClock
from isthmus.common.errors import (
    DeadlineError,
    HandshakeError,
    InstanceLostError,
    IsthmusError,
    LayoutMismatchError,
    StaleEpochError,
    TransferError,
    TransferHopelessError,
    TransferTimeoutError,
)
from isthmus.common.ids import BlockId, InstanceId
from isthmus.common.transfer import Checksum, RankEndpoint, TransferTicket
from isthmus.kvtransfer.connectors.local import LocalFabric
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.notification import Flags, Notification
from isthmus.kvtransfer.receive_session import Ignored, ReceiveState
from isthmus.kvtransfer.send_session import SendState
from tests.support.movable_clock import MovableClock
from tests.support.poll import poll_until
from tests.support.transfer_pair import (
    CONFIG,
    LAYOUT,
    NUM_BLOCKS,
    TransferEnd,
    TransferPair,
    blocks,
    transfer_pair,
)

pytestmark = pytest.mark.asyncio


async def test_handshake_is_per_epoch_and_repeating_it_changes_nothing() -> None:
    async with transfer_pair() as pair:
        prefill, decode = pair.prefill.manager, pair.decode.manager
        assert prefill.knows(pair.decode.ref)
        assert decode.knows(pair.prefill.ref)
        assert not decode.knows(replace(pair.prefill.ref, epoch=2))
        send, _ = pair.open([0])
        await asyncio.gather(*(prefill.answer(decode.offer()) for _ in range(16)))
        assert send.is_open


async def test_layout_mismatch_leaves_no_peer() -> None:
    async with transfer_pair() as pair:
        other_layout = replace(LAYOUT, dtype="bfloat16")
        other = TransferEnd("decode-9", 1, pair.fabric, pair.clock, layout=other_layout)
        with pytest.raises(LayoutMismatchError, match="KV in float32 becomes bfloat16 in 0 bytes"):
            await pair.prefill.manager.answer(other.manager.offer())
        assert not pair.prefill.manager.knows(other.ref)
        await other.manager.close()


async def test_peer_that_does_not_answer_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with transfer_pair() as pair:
        silent, other = (
            TransferEnd(name, 1, pair.fabric, pair.clock) for name in ("decode-8", "decode-9")
        )
        port, asked, gate = pair.prefill.stores.ports[0], asyncio.Event(), asyncio.Event()
        add_peer = port.add_peer

        async def answers_late(peer: RankEndpoint, connector: str, timeout_s: float) -> PeerName:
            if peer == silent.manager.offer().ranks[0]:
                asked.set()
                await gate.wait()
            return await add_peer(peer, connector, timeout_s)

        monkeypatch.setattr(port, "add_peer", answers_late)
        waiting = asyncio.ensure_future(pair.prefill.manager.answer(silent.manager.offer()))
        await asyncio.wait_for(asked.wait(), 20)
        await asyncio.wait_for(pair.prefill.manager.answer(other.manager.offer()), 20)
        assert pair.prefill.manager.knows(other.ref)
        assert not pair.prefill.manager.knows(silent.ref)
        gate.set()
        await waiting
        assert pair.prefill.manager.knows(silent.ref)
        for end in (silent, other):
            await end.manager.close()


async def test_nothing_is_kept_of_peers_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.kvtransfer.peers.MAX_REMEMBERED", 2)
    async with transfer_pair() as pair:
        prefill = pair.prefill.manager
        for number in range(6):
            other = TransferEnd(f"decode-{10 + number}", 3, pair.fabric, pair.clock)
            await prefill.answer(other.manager.offer())
            await prefill.forget(other.ref.instance_id, is_gone=True)
            await prefill.forget(InstanceId(f"stranger-{number}"))
            await other.manager.close()
        table, drivers = prefill._peers, pair.prefill.stores.ports[0]._drivers
        assert table._turns == {}
        assert set(drivers._by_peer) == {"decode-0@1"}
        # Of those there, and of the last to leave, it is known which epoch is the newest.
        assert set(table._newest) == {"decode-0", "decode-15"}
        with pytest.raises(StaleEpochError):
            table.check_epoch(replace(other.ref, epoch=2))


async def test_unreachable_peer_is_a_handshake_error() -> None:
    async with transfer_pair() as pair:
        other = TransferEnd("decode-9", 1, pair.fabric, pair.clock)
        await other.manager.close()
        with pytest.raises(HandshakeError, match="decode-9"):
            await pair.prefill.manager.answer(other.manager.offer())
        assert not pair.prefill.manager.knows(other.ref)


async def test_same_epoch_with_other_memory_is_refused() -> None:
    async with transfer_pair() as pair:
        offer = pair.decode.manager.offer()
        moved = replace(offer, ranks=(replace(offer.ranks[0], base_address=4096),))
        with pytest.raises(HandshakeError, match="other memory under the same epoch"):
            await pair.prefill.manager.answer(moved)
        assert pair.prefill.manager.knows(pair.decode.ref)


async def test_restarted_prefill_fails_the_sessions_of_its_former_self() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0, 1])
        send.push(0, blocks(1), is_last=False)
        await pair.drive()
        reborn = TransferEnd("prefill-0", 2, pair.fabric, pair.clock)
        await pair.decode.manager.complete(await reborn.manager.answer(pair.decode.manager.offer()))
        with pytest.raises(StaleEpochError):
            await receive.wait_complete()
        assert not pair.decode.manager.knows(pair.prefill.ref)
        send.push(1, blocks(2), is_last=True)  # the old self still lives and writes
        await pair.drive()
        assert receive.state is ReceiveState.FAILED
        assert pair.decode.observer.ignored == [Ignored.FOREIGN]
        with pytest.raises(StaleEpochError):
            await pair.decode.manager.complete(pair.prefill.manager.offer())
        with pytest.raises(StaleEpochError):
            pair.decode.manager.open_receive(pair.ticket([0]))
        await pair.rest(400)
        await reborn.manager.close()


async def test_epoch_stays_stale_after_its_successor_is_forgotten() -> None:
    async with transfer_pair() as pair:
        reborn = TransferEnd("decode-0", 2, pair.fabric, pair.clock)
        await pair.prefill.manager.answer(reborn.manager.offer())
        await pair.prefill.manager.forget(InstanceId("decode-0"), is_gone=True)
        with pytest.raises(StaleEpochError):
            await pair.prefill.manager.answer(pair.decode.manager.offer())
        await reborn.manager.close()


async def test_done_write_to_a_restarted_decode_is_not_trusted() -> None:
    async with transfer_pair("0:delay=4") as pair:
        send, _ = pair.open([0])
        send.push(0, blocks(1), is_last=True)
        await pair.drive(2)
        reborn = TransferEnd("decode-0", 2, pair.fabric, pair.clock)
        await pair.prefill.manager.answer(reborn.manager.offer())
        await pair.drive(6)
        assert send.state is SendState.FAILED
        with pytest.raises(StaleEpochError):
            await send.drained()
        await reborn.manager.close()


async def test_forgotten_peer_fails_both_sides_and_must_shake_hands_again() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0])
        await pair.prefill.manager.forget(pair.decode.ref.instance_id)
        await pair.decode.manager.forget(pair.prefill.ref.instance_id)
        for wait in (send.drained(), receive.wait_complete()):
            with pytest.raises(InstanceLostError):
                await wait
        with pytest.raises(HandshakeError):
            pair.prefill.manager.open_send(pair.ticket([0]))
        await pair.decode.manager.complete(
            await pair.prefill.manager.answer(pair.decode.manager.offer())
        )
        send, receive = pair.open([1])
        send.push(0, blocks(3), is_last=True)
        await pair.drive()
        await receive.wait_complete()


def _broken(pair: TransferPair, **changes: object) -> TransferTicket:
    return replace(pair.ticket([0, 1]), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"protocol_version": 99}, HandshakeError),
        ({"checksum": Checksum.XXH3}, HandshakeError),
        ({"layout_hash": "other"}, LayoutMismatchError),
        ({"deadline_ns": 10**18}, DeadlineError),
        ({"target_block_ids": (BlockId(0), BlockId(0))}, TransferError),
        ({"target_block_ids": (BlockId(0), BlockId(NUM_BLOCKS))}, TransferError),
        ({"target_block_ids": (BlockId(0), BlockId(-1))}, TransferError),
        ({"target_block_ids": ()}, TransferError),
        ({"num_tokens": 9}, TransferError),
        ({"first_block": 1}, TransferError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
async def test_ticket_that_cannot_be_right_opens_nothing(
    changes: dict[str, object], error: type[IsthmusError]
) -> None:
    async with transfer_pair() as pair:
        ticket = _broken(pair, **changes)
        for opens in (pair.prefill.manager.open_send, pair.decode.manager.open_receive):
            with pytest.raises(error):
                opens(ticket)  # type: ignore[operator]
        pair.assert_idle()


async def test_ticket_of_another_epoch_opens_nothing() -> None:
    async with transfer_pair() as pair:
        for side in ("source", "target"):
            ref = replace(getattr(pair.ticket([0]), side), epoch=2)
            ticket = replace(pair.ticket([0]), **{side: ref})
            with pytest.raises((StaleEpochError, HandshakeError)):
                pair.prefill.manager.open_send(ticket)
        old = replace(pair.decode.ref, epoch=0)
        with pytest.raises(StaleEpochError):
            pair.decode.manager.open_receive(replace(pair.ticket([0]), target=old))
        pair.assert_idle()


async def test_transfer_id_is_used_once_at_a_time() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0])
        for opens in (pair.prefill.manager.open_send, pair.decode.manager.open_receive):
            with pytest.raises(TransferError, match="in use"):
                opens(send.ticket)  # type: ignore[operator]
        assert send.is_open
        assert receive.is_open


async def test_late_notification_of_a_finished_transfer_is_counted() -> None:
    async with transfer_pair() as pair:
        send, _ = pair.open([0])
        send.push(0, blocks(1), is_last=True)
        await pair.drive()
        late = Notification(send.ticket.transfer_id, 0, 0, 1, 0, 1, Flags.LAST).encode()
        pair.prefill.connector.post_write(PeerName("decode-0@1"), (), late)
        await pair.drive()
        assert pair.decode.manager.ignored == {Ignored.UNKNOWN: 1}


async def test_close_fails_every_session_and_opens_no_more() -> None:
    async with transfer_pair() as pair:
        send, receive = pair.open([0])
        await pair.prefill.manager.close()
        await pair.decode.manager.close()
        await pair.decode.manager.close()
        for wait in (send.drained(), receive.wait_complete()):
            with pytest.raises(TransferError, match="shutting down"):
                await wait
        with pytest.raises(TransferError, match="shutting down"):
            pair.decode.manager.open_receive(pair.ticket([0]))
        receive.peer_quiesced()


async def test_many_transfers_share_a_pair_of_managers() -> None:
    async with transfer_pair() as pair:
        targets = np.random.default_rng(7).permutation(NUM_BLOCKS).reshape(8, 4)
        sources = np.random.default_rng(8).permutation(NUM_BLOCKS).reshape(8, 4)
        sessions = [pair.open([int(block) for block in row]) for row in targets]
        for step in range(2):
            for (send, _), row in zip(sessions, sources, strict=True):
                half = blocks(*row[2 * step : 2 * step + 2].tolist())
                send.push(2 * step, half, is_last=step == 1)
            await pair.drive(1)
        await pair.drive()
        for (_, receive), row, target in zip(sessions, sources, targets, strict=True):
            await receive.wait_complete()
            assert (pair.decode.blocks(target) == pair.prefill.blocks(row)).all()
        assert pair.decode.manager.bytes_received == pair.prefill.manager.bytes_sent
        assert pair.decode.manager.bytes_received == NUM_BLOCKS * LAYOUT.block_bytes
        pair.assert_idle()


# --- links ---------------------------------------------------------------------------------------


async def _measured(pair: TransferPair) -> None:
    """One block in a tenth of a second."""
    send, receive = pair.open([0])
    send.push(0, blocks(7), is_last=True)
    await pair.drive(1)
    pair.clock.advance_ms(100)
    await pair.drive()
    assert receive.state is ReceiveState.COMPLETE


async def test_a_link_is_measured_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.kvtransfer.link.LEAST_SAMPLE_BYTES", 1)
    async with transfer_pair("0:delay=2") as pair:
        assert pair.prefill.manager.bytes_per_s() == {}
        await _measured(pair)
        rates = {pair.decode.ref.instance_id: pytest.approx(10 * LAYOUT.block_bytes)}
        assert pair.prefill.manager.bytes_per_s() == rates
        assert pair.prefill.observer.bytes_per_s == rates
        await pair.prefill.manager.forget(pair.decode.ref.instance_id)
        assert pair.prefill.observer.bytes_per_s == {}


async def test_a_transfer_in_vain_is_refused_or_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten blocks a second are measured, so twenty are believed: eight take 0.4 s at best."""
    monkeypatch.setattr("isthmus.kvtransfer.link.LEAST_SAMPLE_BYTES", 1)
    async with transfer_pair("0:delay=2") as pair:
        await _measured(pair)
        with pytest.raises(TransferHopelessError):
            pair.prefill.manager.open_send(pair.ticket(range(8), timeout_ms=300))
        assert pair.prefill.observer.num_hopeless == 1
        send, receive = pair.open(range(8), timeout_ms=1000)
        pair.clock.advance_ms(500)
        send.push(0, blocks(10, 11), is_last=False)
        assert send.is_open  # six would go on: there is time for ten
        pair.clock.advance_ms(250)
        await pair.drive()
        assert isinstance(send.error, TransferHopelessError)
        assert pair.prefill.observer.num_hopeless == 2
        assert receive.state is ReceiveState.FAILED  # told at once, not at the deadline
        assert receive.is_quiescent
        assert pair.prefill.observer.ended[-1] == ("send", "failed", 0)


async def test_many_instances_may_meet_one_at_once() -> None:
    clock, fabric = VirtualClock(10**18), LocalFabric()
    prefill = TransferEnd("prefill-0", 1, fabric, clock)
    decodes = [TransferEnd(f"decode-{number}", 1, fabric, clock) for number in range(64)]

    async def meet(decode: TransferEnd) -> None:
        answer = await prefill.manager.answer(decode.manager.offer())
        await decode.manager.complete(answer)

    try:
        await asyncio.gather(*(meet(decode) for decode in decodes))
        assert all(prefill.manager.knows(decode.ref) for decode in decodes)
        assert all(decode.manager.knows(prefill.ref) for decode in decodes)
    finally:
        for end in (prefill, *decodes):
            await end.manager.close()


# --- running by itself, on real time -----------------------------------------------------------


async def _start(
    script: str, deadline_ms: int = 60_000, clock: SystemClock | None = None
) -> TransferPair:
    fabric, clock = LocalFabric(), clock or SystemClock()
    config = CONFIG.model_copy(update={"deadline_ms": deadline_ms, "quarantine_ms": 20})
    ends = [
        TransferEnd(name, 1, fabric, clock, faults, config=config)  # type: ignore[arg-type]
        for name, faults in (("prefill-0", script), ("decode-0", ""))
    ]
    pair = TransferPair(ends[0], ends[1], clock, fabric)  # type: ignore[arg-type]
    await pair.decode.manager.complete(
        await pair.prefill.manager.answer(pair.decode.manager.offer())
    )
    pair.prefill.manager.start()
    pair.decode.manager.start()
    return pair


async def _close(pair: TransferPair) -> None:
    await pair.prefill.manager.close()
    await pair.decode.manager.close()


async def test_started_managers_move_blocks_and_then_rest() -> None:
    pair = await _start("")
    send, receive = pair.open([3, 4], timeout_ms=60_000)
    send.push(0, blocks(1, 2), is_last=True)
    await asyncio.gather(send.drained(), receive.wait_complete())
    assert (pair.decode.blocks(blocks(3, 4)) == pair.prefill.blocks(blocks(1, 2))).all()
    pair.assert_idle()
    managers = (pair.prefill.manager, pair.decode.manager)
    kicks = [kick for manager in managers for kick in manager._pollers._kicks]
    # A poller that waits for its kick sweeps no more; one that merely has no CPU time would.
    await poll_until(lambda: all(kick._waiters and not kick.is_set() for kick in kicks))
    seen = [manager.num_sweeps for manager in managers]
    for _ in range(100):
        await asyncio.sleep(0)
    assert all(kick._waiters and not kick.is_set() for kick in kicks)
    assert [manager.num_sweeps for manager in managers] == seen
    await _close(pair)


async def test_deadline_fires_by_itself_and_blocks_come_back_after_quarantine() -> None:
    clock = MovableClock()
    pair = await _start("0:hang", clock=clock)
    send, receive = pair.open([3], timeout_ms=60_000)
    send.push(0, blocks(1), is_last=True)
    await poll_until(lambda: bool(pair.prefill.connector._scripted))  # posted, and hangs
    clock.advance_ms(60_000)
    with pytest.raises(TransferTimeoutError):
        await receive.wait_complete()
    with pytest.raises(TransferTimeoutError):
        await send.drained()
    assert await receive.quiesced(timeout_s=60)
    assert not await send.quiesce()
    await _close(pair)


async def test_a_stall_is_noticed_by_itself_long_before_the_deadline() -> None:
    pair = await _start("0:drop", 50)
    send, receive = pair.open([3], timeout_ms=600_000)
    send.push(0, blocks(1), is_last=True)
    receive.announced(receive.ticket.num_tokens)
    with pytest.raises(TransferTimeoutError, match="none had come for 50 ms"):
        await asyncio.wait_for(receive.wait_complete(), 60)
    await send.drained()
    await _close(pair)


async def test_poller_that_fails_fails_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await _start("")
    _, receive = pair.open([3], timeout_ms=60_000)

    def broken(rank: int, peer_name: PeerName, payload: bytes) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(pair.decode.manager._inbox, "accept", broken)
    pair.prefill.connector.post_write(PeerName("decode-0@1"), (), b"x")
    with pytest.raises(TransferError, match="poller failed"):
        await receive.wait_complete()
    with pytest.raises(TransferError):
        pair.decode.manager.open_receive(pair.ticket([5], timeout_ms=60_000))
    await _close(pair)
