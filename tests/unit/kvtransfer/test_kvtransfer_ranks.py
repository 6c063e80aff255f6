"""Transfers between instances of unlike numbers of ranks, whichever process a rank is in."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from isthmus.common.errors import (
    ChecksumError,
    HandshakeError,
    InstanceLostError,
    TransferError,
    TransferHopelessError,
    TransferTimeoutError,
)
from isthmus.common.kv_layout import KvLayout
from isthmus.kvtransfer.chunks import LayerPart
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.link import LEAST_WINDOW_BYTES, WRITES_IN_WINDOW
from isthmus.kvtransfer.notification import Flags, Notification
from isthmus.kvtransfer.receive_session import Proof, ReceiveState
from isthmus.kvtransfer.routes import meeting_ranks, routes_between
from isthmus.kvtransfer.send_session import SendState
from tests.support.poll import poll_until
from tests.support.rank_ports import rank_pair, served
from tests.support.transfer_pair import CHECKED, LAYOUT, RankStores, blocks, ranked

pytestmark = pytest.mark.asyncio

SIZES = (1, 2, 4)
PAIRS = [(source, target) for source in SIZES for target in SIZES]


def layouts(num_heads: int, tp_size: int, block_size: int = 4) -> tuple[KvLayout, ...]:
    return ranked(replace(LAYOUT, block_size=block_size), num_heads, tp_size)


# --- who meets whom ------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("num_heads", [2, 4])
async def test_every_head_of_every_target_rank_has_one_route(
    source: int, target: int, num_heads: int
) -> None:
    routes = routes_between(layouts(num_heads, source), layouts(num_heads, target))
    brought = [(route.target.tp_rank, head) for route in routes for head in route.heads]
    wanted = [(t.tp_rank, head) for t in layouts(num_heads, target) for head in t.heads]
    assert sorted(brought) == sorted(wanted)
    whole = sum(t.layer_bytes for t in layouts(num_heads, target))
    assert sum(route.layer_bytes for route in routes) == whole


async def test_ranks_that_share_no_head_never_meet() -> None:
    assert meeting_ranks(layouts(4, 2), layouts(4, 2)) == ((0, 0), (1, 1))
    assert meeting_ranks(layouts(4, 1), layouts(4, 2)) == ((0, 0), (0, 1))
    # Heads 0 0 1 1: one copy of each writes to the single rank, which writes to all.
    assert meeting_ranks(layouts(2, 4), layouts(2, 1)) == ((0, 0), (1, 0), (2, 0), (3, 0))


# --- all nine pairs ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "remote"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
async def test_tokens_arrive_on_every_rank(source: int, target: int, is_remote: bool) -> None:
    """Two KV heads: with four ranks each is on two of them. The blocks of the sides differ."""
    here, there = layouts(2, source, block_size=4), layouts(2, target, block_size=8)
    async with rank_pair(here, there, is_remote=is_remote, config=CHECKED) as (pair, _):
        before = [memory.copy() for memory in pair.decode.stores.memories]
        send, receive = pair.open([5, 9, 2], num_tokens=22)
        send.push(0, blocks(3, 8), is_last=False, num_blocks=1)
        await pair.drive(2)
        assert not receive.is_quiescent
        send.push(1, blocks(1, 20, 7, 4), is_last=True, num_blocks=2)
        await pair.drive(3)
        await send.drained()
        await receive.wait_complete()
        assert (receive.proof, receive.state) == (Proof.ALL_ARRIVED, ReceiveState.COMPLETE)
        expected = pair.prefill.stores.tokens(blocks(3, 8, 1, 20, 7, 4), 22)
        assert (pair.decode.stores.tokens(blocks(5, 9, 2), 22) == expected).all()
        assert send.num_chunks == 2
        assert receive.num_bytes == 3 * sum(layout.block_bytes for layout in there)
        assert pair.decode.observer.ended == [("receive", "complete", receive.num_bytes)]
        for layout, memory, was in zip(there, pair.decode.stores.memories, before, strict=True):
            changed = (memory != was).reshape(-1, layout.block_bytes).any(axis=1)
            assert set(changed.nonzero()[0]) == {2, 5, 9}
        assert await send.quiesce()
        pair.assert_idle()


@pytest.mark.parametrize(("source", "target"), PAIRS)
async def test_like_blocks_of_latents_arrive_on_every_rank(source: int, target: int) -> None:
    latents = replace(LAYOUT, kind="mla")
    async with rank_pair(ranked(latents, 1, source), ranked(latents, 1, target)) as (pair, _):
        send, receive = pair.open([5, 9])
        send.push(0, blocks(3, 8), is_last=True)
        await pair.drive()
        await receive.wait_complete()
        expected = pair.prefill.stores.tokens(blocks(3, 8), 8)
        assert (pair.decode.stores.tokens(blocks(5, 9), 8) == expected).all()
        assert send.num_bytes == receive.num_bytes == target * 2 * latents.layer_bytes * 2


# --- no rank's word is enough --------------------------------------------------------------------


async def test_a_transfer_is_complete_when_every_route_is() -> None:
    """Of two routes one is late: its writes hang on the sender's second rank alone."""
    async with rank_pair(layouts(2, 2), layouts(2, 2)) as (pair, _):
        pair.prefill.stores.connectors[1]._faults = rank_faults("0:delay=9")
        send, receive = pair.open([5])
        send.push(0, blocks(3), is_last=True)
        await pair.drive(4)
        assert (send.state, receive.state) == (SendState.DRAINING_NIC, ReceiveState.RECEIVING)
        await pair.drive(8)
        assert (send.state, receive.state) == (SendState.DONE, ReceiveState.COMPLETE)


def rank_faults(script: str):  # type: ignore[no-untyped-def]
    from isthmus.kvtransfer.connectors.fake import parse_script

    return parse_script(script)[1]


async def test_one_rank_without_its_word_expires_and_rests_on_every_rank() -> None:
    async with rank_pair(layouts(2, 2), layouts(2, 2)) as (pair, _):
        pair.prefill.stores.connectors[1]._faults = rank_faults("0:drop")
        _, receive = sessions = pair.open([5, 6])
        sessions[0].push(0, blocks(3, 4), is_last=True)
        await pair.drive()
        receive.announced(receive.ticket.num_tokens)
        pair.clock.advance_ms(1000)
        await pair.decode.manager.sweep_once()
        with pytest.raises(TransferTimeoutError, match="0 of 2 blocks"):
            await receive.wait_complete()
        for _ in range(8):  # one rank's rest is not the other's
            pair.clock.advance_ms(50)
            await pair.decode.manager._sweep(0, 0.0)
        assert not receive.is_quiescent
        for _ in range(8):
            pair.clock.advance_ms(50)
            await pair.decode.manager._sweep(1, 0.0)
        assert receive.proof is Proof.QUARANTINE_PASSED


async def test_a_failed_write_of_any_rank_takes_the_proof_away() -> None:
    async with rank_pair(layouts(2, 2), layouts(2, 1)) as (pair, _):
        pair.prefill.stores.connectors[1]._faults = rank_faults("0:fail")
        send, receive = pair.open([5])
        send.push(0, blocks(3), is_last=True)
        await pair.drive()
        with pytest.raises(TransferError):
            await send.drained()
        assert not await send.quiesce()
        with pytest.raises(TransferError, match="gave up"):
            await receive.wait_complete()
        assert not receive.is_quiescent
        await pair.rest(400)
        assert receive.is_quiescent


async def test_a_cancelled_send_is_quiet_when_all_its_ranks_are() -> None:
    async with rank_pair(layouts(2, 4), layouts(2, 1), is_remote=True) as (pair, links):
        send, receive = pair.open([5, 6])
        send.push(0, blocks(3), is_last=False)
        send.cancel()
        assert not send.is_quiet
        await pair.prefill.manager.sweep_once()
        assert await send.quiesce()
        await pair.drive()
        assert (receive.state, receive.proof) == (ReceiveState.FAILED, Proof.SENDER_CONFIRMED)
        pair.assert_idle()
        for link in links["prefill-0"]:
            assert not link.port._owners
            assert not link.server._owners


@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "remote"])
async def test_damage_on_one_rank_is_seen(is_remote: bool) -> None:
    async with rank_pair(
        layouts(2, 1), layouts(2, 2), is_remote=is_remote, script="1:flip", config=CHECKED
    ) as (pair, _):
        send, receive = pair.open([5])
        send.push(0, blocks(3), is_last=True)
        await pair.drive()
        with pytest.raises(ChecksumError):
            await receive.wait_complete()
        assert pair.decode.observer.num_corrupt == 1
        assert receive.is_quiescent


async def test_a_rank_that_writes_where_it_has_nothing_fails_the_transfer() -> None:
    async with rank_pair(layouts(2, 4), layouts(2, 2)) as (pair, _):
        send, receive = pair.open([5])
        note = Notification(
            send.ticket.transfer_id, 0, 0, LAYOUT.num_layers - 1, 0, 1, Flags.LAST
        ).encode()
        # Rank 1 has a copy of head 0, but for target rank 0 it is rank 0's turn.
        port = pair.prefill.stores.connectors[1]
        port.post_write(PeerName("decode-0@1"), (), note)
        await pair.decode.manager.sweep_once()
        with pytest.raises(TransferError, match="no route"):
            await receive.wait_complete()
        send.cancel()
        await pair.drive()


# --- a handshake is with all ranks ---------------------------------------------------------------


async def test_an_instance_is_a_peer_with_all_its_ranks_or_not_at_all() -> None:
    async with rank_pair(layouts(2, 2), layouts(2, 2)) as (pair, _):
        other = RankStores("decode-9", 1, pair.fabric, pair.clock, layouts(2, 2))
        offer = pair.decode.manager.offer()
        ref = replace(offer.instance, instance_id="decode-9")
        ranks = tuple(port.endpoint for port in other.ports)
        await other.ports[1].close(5)
        with pytest.raises(HandshakeError, match="decode-9"):
            await pair.prefill.manager.answer(replace(offer, instance=ref, ranks=ranks))
        assert not pair.prefill.manager.knows(ref)
        await other.ports[0].close(5)


async def test_a_forgotten_instance_leaves_no_rank_behind() -> None:
    async with rank_pair(layouts(2, 2), layouts(2, 4)) as (pair, _):
        send, _ = pair.open([5])
        await pair.prefill.manager.forget(pair.decode.ref.instance_id)
        with pytest.raises(InstanceLostError):
            await send.drained()
        for connector in pair.prefill.stores.connectors:
            for name in ("decode-0@1", "decode-0@1/1", "decode-0@1/2", "decode-0@1/3"):
                with pytest.raises(TransferError, match="not a peer"):
                    connector.post_write(PeerName(name), (), b"?")
        await pair.decode.manager.complete(
            await pair.prefill.manager.answer(pair.decode.manager.offer())
        )
        await pair.decode.manager.forget(pair.prefill.ref.instance_id, is_gone=True)


async def test_no_rank_sends_a_layer_before_it_is_computed() -> None:
    async with rank_pair(layouts(2, 2), layouts(2, 2), is_remote=True) as (pair, _):
        computed: list[bool] = []
        send, receive = pair.open([5])
        early = LayerPart(range(1), lambda: bool(computed))
        send.push(0, blocks(3), is_last=False, part=early)
        send.push(0, blocks(3), is_last=True, part=LayerPart(range(1, LAYOUT.num_layers)))
        await pair.drive()
        assert receive.is_open
        one_layer = 2 * LAYOUT.layer_bytes  # of two ranks
        assert (send.num_bytes, receive.num_bytes) == (one_layer, one_layer)
        computed.append(True)
        await pair.drive()
        await receive.wait_complete()
        await send.drained()


async def test_progress_that_cannot_be_asked_for_fails_the_transfer_alone() -> None:
    async with rank_pair(layouts(2, 2), layouts(2, 2), is_remote=True) as (pair, _):

        def breaks() -> bool:
            raise RuntimeError("the device is lost")

        send, receive = pair.open([5])
        send.push(0, blocks(3), is_last=False, part=LayerPart(range(1), breaks))
        await pair.prefill.manager._sweep(1, 0.0)  # the follower's rank
        with pytest.raises(TransferError, match="the device is lost"):
            await send.drained()
        await pair.drive()
        assert (receive.state, receive.proof) == (ReceiveState.FAILED, Proof.SENDER_CONFIRMED)
        pair.assert_idle()


# --- how fast links are --------------------------------------------------------------------------


async def test_a_follower_tells_its_leader_how_fast_its_links_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("isthmus.kvtransfer.link.LEAST_SAMPLE_BYTES", 1)
    pairs = layouts(2, 2), layouts(2, 2)
    async with rank_pair(*pairs, is_remote=True, script="0:delay=2") as (pair, _):
        manager, peer = pair.prefill.manager, pair.decode.ref.instance_id
        follower, name = pair.prefill.manager._ports[1], PeerName("decode-0@1/1")
        assert follower.bytes_per_s(name) is None
        send, receive = pair.open([0])
        send.push(0, blocks(7), is_last=True)
        await pair.drive(1)
        pair.clock.advance_ms(100)
        await pair.drive()
        await receive.wait_complete()
        each = 10 * LAYOUT.block_bytes
        assert follower.bytes_per_s(name) == pytest.approx(each)
        # Both ranks send side by side, and neither is guessed from the other.
        pair.prefill.stores.ports[0].bytes_per_s = lambda _: None  # type: ignore[method-assign]
        assert manager.bytes_per_s() == {peer: pytest.approx(2 * each)}
        follower.check_in_time(name, each, pair.clock.monotonic_ns() + 10**9)
        with pytest.raises(TransferHopelessError, match="the link carries"):
            follower.check_in_time(name, 3 * each, pair.clock.monotonic_ns() + 10**9)
        pair.clock.advance_ms(11_000)  # too old to judge by
        follower.check_in_time(name, 3 * each, pair.clock.monotonic_ns() + 10**9)
        await manager.forget(peer)
        assert follower.bytes_per_s(name) is None


async def test_writes_of_a_follower_grow_with_what_its_link_carries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("isthmus.kvtransfer.link.LEAST_SAMPLE_BYTES", 1)
    pairs = layouts(2, 2), layouts(2, 2)
    async with rank_pair(*pairs, is_remote=True, script="0:delay=2") as (pair, _):
        follower, name = pair.prefill.manager._ports[1], PeerName("decode-0@1/1")
        before = follower.max_write_bytes(name)
        send, receive = pair.open([0])
        send.push(0, blocks(7), is_last=True)
        await pair.drive(1)
        pair.clock.advance_ms(900)  # a slow one
        await pair.drive()
        await receive.wait_complete()
        assert follower.max_write_bytes(name) == LEAST_WINDOW_BYTES // WRITES_IN_WINDOW < before


# --- a lost follower -----------------------------------------------------------------------------


async def test_a_lost_follower_fails_all_sessions_and_is_told() -> None:
    async with rank_pair(layouts(2, 2), layouts(2, 2), is_remote=True) as (pair, links):
        told: list[BaseException] = []
        pair.prefill.manager._on_failed = told.append
        pair.prefill.stores.connectors[1]._faults = rank_faults("0:hang")
        pair.prefill.manager.start()
        send, receive = pair.open([5])
        send.push(0, blocks(3), is_last=True)
        await poll_until(lambda: pair.prefill.stores.ports[1].num_open_writes == 1)
        links["prefill-0"][0].cut()
        with pytest.raises(InstanceLostError, match="rank 1 of this instance is lost"):
            await asyncio.wait_for(send.drained(), 20)
        assert not await send.quiesce()
        await poll_until(lambda: bool(told))
        assert isinstance(told[0], InstanceLostError)
        with pytest.raises(InstanceLostError):
            pair.prefill.manager.open_send(pair.ticket([6]))
        receive.cancel()
        await pair.rest(2000)
        assert receive.is_quiescent


async def test_a_follower_that_loses_its_leader_posts_nothing_more() -> None:
    async with rank_pair(layouts(2, 2), layouts(2, 2), is_remote=True) as (pair, links):
        send, receive = pair.open([5])
        before = pair.decode.stores.memories[1].copy()
        link = links["prefill-0"][0]
        link.port._writer.close()  # as the end of the leader's process does
        send.push(0, blocks(3), is_last=True)
        await asyncio.wait_for(asyncio.shield(link.task), 20)
        await pair.decode.manager.sweep_once()
        assert (pair.decode.stores.memories[1] == before).all()
        assert receive.is_open
        send.cancel()
        receive.cancel()
        await pair.rest(2000)


async def test_a_silent_follower_is_lost() -> None:
    async with rank_pair(layouts(2, 1), layouts(2, 1)) as (pair, _):
        stores = RankStores("other", 1, pair.fabric, pair.clock, layouts(2, 1))
        async with served(stores.ports[0], pair.clock, silence_s=0.5) as link:
            sweep = await link.port.sweep(60.0)
            assert isinstance(sweep.error, InstanceLostError)
            assert "answers nothing" in str(sweep.error)
            with pytest.raises(InstanceLostError):
                await link.port.add_peer(stores.ports[0].endpoint, "fake", 1.0)
