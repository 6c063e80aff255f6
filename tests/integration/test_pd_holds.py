"""Blocks that are still being sent belong to the transfer, however long it takes to end."""

from __future__ import annotations

import pytest

from isthmus.common.cluster import Role
from isthmus.common.metrics import HOLD_EXPIRED
from isthmus.kvtransfer.connectors.fake import FakeConnector
from isthmus.kvtransfer.interface import PeerName
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import GatewayStub, make_request
from tests.support.local_cluster import LocalCluster, local_config
from tests.support.poll import poll_until

pytestmark = [pytest.mark.asyncio, pytest.mark.fault, pytest.mark.timeout(120)]

PROMPT = make_prompt(60)
STUCK = {"connector": "fake", "fault_script": "0+:hang", "deadline_ms": 600_000}


async def test_a_hold_that_expires_keeps_its_blocks_while_a_write_reads_them() -> None:
    config = local_config(transfer={**STUCK, "hold_ms": 100, "quarantine_ms": 600_000})
    expired = HOLD_EXPIRED.labels("prefill", "prefill-0")
    before = expired._value.get()
    async with LocalCluster(config) as cluster:
        prefill = await cluster.start(Role.PREFILL, "prefill-0")
        decode = await cluster.start(Role.DECODE, "decode-0")
        assert prefill.info is not None
        assert decode.info is not None
        assert prefill.engine is not None
        async with GatewayStub(decode.info) as stream:
            await stream.submit(make_request(PROMPT, max_tokens=4), prefill.info)
            await poll_until(lambda: expired._value.get() > before, 30)
            assert prefill.engine.load().held_blocks >= len(PROMPT) // 4
            assert expired._value.get() == before + 1


async def test_a_peer_whose_writes_do_not_end_is_dropped_before_its_blocks_are_given_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is asked for again by its next request, which is served as if nothing had been."""
    config = local_config(transfer={**STUCK, "fault_script": "0:hang", "quarantine_ms": 100})
    held_when_removed: list[int] = []
    remove = FakeConnector.remove_peer

    def remove_peer(connector: FakeConnector, peer: PeerName) -> None:
        held_when_removed.append(engine.load().held_blocks)
        remove(connector, peer)

    async with LocalCluster(config) as cluster:
        prefill = await cluster.start(Role.PREFILL, "prefill-0")
        decode = await cluster.start(Role.DECODE, "decode-0")
        assert prefill.info is not None
        assert decode.info is not None
        engine = prefill.engine
        assert engine is not None
        async with GatewayStub(decode.info) as stream:
            answer = await stream.submit(make_request(PROMPT, max_tokens=4), prefill.info)
            await poll_until(lambda: engine.load().held_blocks > 0, 30)
            with monkeypatch.context() as patch:
                patch.setattr(FakeConnector, "remove_peer", remove_peer)
                await stream.abort(answer)
                await poll_until(lambda: engine.load().held_blocks == 0, 30)
            assert held_when_removed
            assert held_when_removed[0] >= len(PROMPT) // 4
            again = await stream.run(make_request(PROMPT, max_tokens=4), prefill.info)
        assert again.finished is not None
        assert again.finished.local_reason == "none"
