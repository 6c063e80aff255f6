"""A peer that comes back with another role: KV goes the other way, and nothing of before stays."""

from __future__ import annotations

import pytest

from isthmus.common.errors import StaleEpochError
from isthmus.kvtransfer.receive_session import ReceiveState
from tests.support.transfer_pair import TransferEnd, TransferPair, blocks, transfer_pair


@pytest.mark.asyncio
async def test_a_sender_that_comes_back_to_receive_is_a_peer_of_its_new_epoch_alone() -> None:
    async with transfer_pair("0:delay=4") as pair:
        send, receive = pair.open([3, 4])
        send.push(0, blocks(1), is_last=False)
        await pair.drive(1)
        reborn = TransferEnd("prefill-0", 2, pair.fabric, pair.clock)  # it decodes now
        await reborn.manager.complete(await pair.decode.manager.answer(reborn.manager.offer()))
        with pytest.raises(StaleEpochError):
            await receive.wait_complete()
        # What the old one had begun may land yet: its targets rest, whatever the new one does.
        assert not receive.is_quiescent

        other_way = TransferPair(pair.decode, reborn, pair.clock, pair.fabric)
        back, arrives = other_way.open([5], timeout_ms=60_000)
        back.push(0, blocks(6), is_last=True)
        await other_way.drive(6)
        await arrives.wait_complete()
        await back.drained()
        assert (reborn.blocks(blocks(5)) == pair.decode.blocks(blocks(6))).all()

        send.push(1, blocks(2), is_last=True)  # the old self still lives and writes
        await pair.drive(6)
        assert receive.state is ReceiveState.FAILED
        await pair.rest(2_000)  # its deadline and the quarantine
        assert receive.is_quiescent
        await reborn.manager.close()
