"""Writes and connectors that do not come back."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from isthmus.common.errors import InstanceLostError, TransferError
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.connectors.fake import FakeConnector
from isthmus.kvtransfer.connectors.local import LocalFabric
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.send_session import SendSession
from tests.support.movable_clock import MovableClock
from tests.support.poll import poll_until
from tests.support.transfer_pair import CONFIG, TransferEnd, TransferPair, blocks

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def running_pair(script: str = "") -> AsyncIterator[TransferPair]:
    """Both managers drive themselves; ``script``: faults of the prefill side's writes."""
    clock, fabric = MovableClock(), LocalFabric()
    config = CONFIG.model_copy(update={"quarantine_ms": 600_000})
    ends = [
        TransferEnd(name, 1, fabric, clock, faults, config=config)  # type: ignore[arg-type]
        for name, faults in (("prefill-0", script), ("decode-0", ""))
    ]
    pair = TransferPair(*ends, clock, fabric)  # type: ignore[arg-type]
    await pair.decode.manager.complete(
        await pair.prefill.manager.answer(pair.decode.manager.offer())
    )
    try:
        for end in ends:
            end.manager.start()
        yield pair
    finally:
        for end in ends:
            await end.manager.close()


async def hung_send(pair: TransferPair) -> SendSession:
    """A session that has ended, one of whose writes has not."""
    send, _ = pair.open([3], timeout_ms=60_000)
    send.push(0, blocks(1), is_last=True)
    await poll_until(lambda: bool(pair.prefill.connector._scripted))  # posted, and hangs
    send.cancel()
    assert not send.is_quiet
    return send


def never_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes go on hanging when their peer has been removed."""

    def keeps(connector: FakeConnector, peer: PeerName) -> None:
        pass

    monkeypatch.setattr("isthmus.kvtransfer.severing._LET_GO_S", 0.05)
    monkeypatch.setattr(FakeConnector, "remove_peer", keeps)


async def test_a_hung_write_keeps_its_session_no_longer_than_the_quarantine() -> None:
    """Whoever began it may be gone: nobody has to ask for it."""
    async with running_pair("0:hang") as pair:
        send = await hung_send(pair)
        other, _ = pair.open([5], timeout_ms=6_000_000)
        pair.clock.advance_ms(599_000)
        pair.prefill.manager.expire_due()
        assert pair.prefill.manager.knows(pair.decode.ref)
        pair.clock.advance_ms(1_100)
        pair.prefill.manager.expire_due()
        await send.at_rest()
        assert not await send.quiesce()  # it may have landed in part
        assert isinstance(other.error, InstanceLostError)
        await poll_until(lambda: pair.prefill.manager.sessions_by_state() == {})
        assert not pair.prefill.manager.knows(pair.decode.ref)
        # It becomes a peer again by a handshake, and is written to as if nothing had been.
        await pair.prefill.manager.answer(pair.decode.manager.offer())
        send, receive = pair.open([7], timeout_ms=60_000)
        send.push(0, blocks(2), is_last=True)
        await receive.wait_complete()
        await send.drained()


async def test_a_write_to_an_instance_that_has_restarted_ends_nothing_of_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never_let_go(monkeypatch)
    async with running_pair("0:hang") as pair:
        told: list[BaseException] = []
        pair.prefill.manager._on_failed = told.append
        await hung_send(pair)
        successor = TransferEnd("decode-0", 2, pair.fabric, pair.clock)
        await pair.prefill.manager.answer(successor.manager.offer())
        pair.clock.advance_ms(600_100)
        pair.prefill.manager.expire_due()
        await poll_until(lambda: bool(told))
        assert pair.prefill.manager.knows(successor.ref)
        await successor.manager.close()


async def test_a_connector_that_does_not_let_go_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never_let_go(monkeypatch)
    async with running_pair("0:hang") as pair:
        told: list[BaseException] = []
        pair.prefill.manager._on_failed = told.append
        await hung_send(pair)
        pair.clock.advance_ms(600_100)
        pair.prefill.manager.expire_due()
        await poll_until(lambda: bool(told))
        assert "does not let go of decode-0" in str(told[0])
        with pytest.raises(TransferError, match="does not let go"):
            pair.prefill.manager.open_receive(pair.ticket([5]))


async def test_a_connector_that_hangs_in_a_call_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else blocks that a peer may write to would stay in quarantine for ever."""
    may_go_on = threading.Event()

    def hangs(connector: FakeConnector) -> list[tuple[PeerName, bytes]]:
        may_go_on.wait(60)
        return []

    monkeypatch.setattr("isthmus.kvtransfer.pollers._LOOK_S", 0.01)
    async with running_pair() as pair:
        told: list[BaseException] = []
        pair.decode.manager._on_failed = told.append
        with monkeypatch.context() as patch:
            patch.setattr(FakeConnector, "take_notifications", hangs)
            _, receive = pair.open([3], timeout_ms=60_000)
            with pytest.raises(TransferError, match="a connector of rank 0 does not come back"):
                await receive.wait_complete()
            assert told
            may_go_on.set()


async def test_a_peer_that_cannot_be_dropped_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[InstanceRef] = []

    async def breaks(peer: InstanceRef) -> None:
        tried.append(peer)
        raise RuntimeError("no such peer")

    async with running_pair("0:hang") as pair:
        told: list[BaseException] = []
        pair.prefill.manager._on_failed = told.append
        await hung_send(pair)
        monkeypatch.setattr(pair.prefill.manager._deadlines._severing, "_forget", breaks)
        pair.clock.advance_ms(600_100)
        pair.prefill.manager.expire_due()
        await poll_until(lambda: bool(told))
        assert "decode-0 could not be dropped: RuntimeError('no such peer')" in str(told[0])
    assert tried == [pair.decode.ref], "not again and again until the process ends"


async def test_a_connector_that_fails_to_drop_a_peer_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(connector: FakeConnector, peer: PeerName) -> None:
        raise RuntimeError("no such peer")

    async with running_pair() as pair:
        with capture_logs() as logs, monkeypatch.context() as patch:
            patch.setattr(FakeConnector, "remove_peer", breaks)
            await pair.prefill.manager.forget(pair.decode.ref.instance_id)
            await poll_until(lambda: bool(logs))
        assert [entry["event"] for entry in logs] == ["a connector did not drop a peer"]
        assert not pair.prefill.manager.knows(pair.decode.ref)
