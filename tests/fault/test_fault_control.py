"""What is not on the path of a token fails: the registry, the gateway, and a past epoch."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import grpc.aio
import pytest

from isthmus.common.cluster import Role
from isthmus.common.errors import StaleEpochError
from isthmus.common.ids import new_transfer_id
from isthmus.common.rpc import create_channel, error_from_rpc
from isthmus.common.transfer import (
    PROTOCOL_VERSION,
    ConnectorOffer,
    RankEndpoint,
    TransferOffer,
    TransferTicket,
)
from isthmus.common.types import InstanceRef
from isthmus.protos.convert.requests import request_to_pb
from isthmus.protos.convert.transfers import offer_to_pb, ticket_to_pb
from isthmus.protos.v1 import prefill_pb2, prefill_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import check_integrity, make_request
from tests.support.serving import Moved, Oracle, Serving, restart_registry, serving

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.nixl,
    pytest.mark.fault,
    pytest.mark.timeout(180),
]

LONG = 1_800
PAIR = (Role.PREFILL, Role.DECODE)
DECODES = ("decode-0", "decode-1")
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


async def test_without_a_registry_the_data_plane_goes_on(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    lease = {"lease_ms": 600}
    async with serving(model, oracle, tmp_path, *PAIR, Role.DECODE, registry=lease) as running:
        moved = await Moved.mark(running)
        answer = running.submit(make_prompt(80, 1), max_tokens=900, **SEEDED)
        await answer.until(5)
        await running.cluster.registry.stop()
        away = time.monotonic()
        num_served = 0
        while time.monotonic() - away < 2.0:  # more than three leases
            running.check(await running.ask(make_prompt(40, num_served), max_tokens=4))
            num_served += 1
        running.check(await answer.end())
        # Even a death is noticed without it: from the streams.
        running.submit(make_prompt(80, 2), max_tokens=300)
        lost = await running.busy(*DECODES)
        await running.kill(lost)
        for n in range(4):
            running.check(await running.ask(make_prompt(50, n), max_tokens=4))
        assert await moved.by("isthmus_local_prefill_total") == 0
        await restart_registry(running.cluster)
        del running.workers[lost]
        for worker in running.workers.values():  # leases are made anew
            await running.cluster.wait_ready(worker)
        await running.wait_serving()
        # The new registry was told of the epochs that the old one had given out.
        (survivor,) = set(DECODES) - {lost}
        await running.kill(survivor)
        assert (await running.restart(survivor)).epoch == 2
        for n in range(4):
            running.check(await running.ask(make_prompt(60, n), max_tokens=4))
        await running.wait_at_rest()


async def test_instances_free_all_that_a_dead_gateway_had_asked_for(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with serving(model, oracle, tmp_path, *PAIR) as running:
        streaming = [running.submit(make_prompt(60, n), max_tokens=1_500) for n in range(3)]
        for answer in streaming:
            await answer.until(3)
        early = running.submit(make_prompt(LONG, 9), max_tokens=8)
        await running.busy("prefill-0")
        running.gateway.signal(signal.SIGKILL)
        await running.gateway.wait()
        for answer in (*streaming, early):
            await answer.end()
            assert answer.broken
            assert not answer.is_done
        await running.wait_at_rest()
        decode = await running.metrics("decode-0")
        assert decode.get("isthmus_aborted_total") == 4
        await running.start_gateway()
        running.check(await running.ask(make_prompt(60, 0), max_tokens=20))
        assert (await running.metrics()).get("isthmus_local_prefill_total") == 0
        await running.wait_at_rest()


async def test_a_client_that_leaves_frees_everything_at_every_stage(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with serving(model, oracle, tmp_path, *PAIR) as running:
        moved = await Moved.mark(running)
        streaming = running.submit(make_prompt(60, 1), max_tokens=1_500)
        await streaming.until(3)
        early = running.submit(make_prompt(LONG, 2), max_tokens=8)
        await running.busy("prefill-0")
        for answer in (early, streaming):
            await answer.leave()
        await running.wait_at_rest()
        assert await moved.by("isthmus_cancels_total") == 2
        assert await moved.by("isthmus_requests_total", outcome="cancelled") == 2
        prefill = await running.metrics("prefill-0")
        assert prefill.get("isthmus_computed_prompt_tokens_total") < LONG
        running.check(await running.ask(make_prompt(60, 1), max_tokens=8))
        await running.wait_at_rest()


async def test_a_past_epoch_is_refused_and_its_blocks_rest_while_it_may_write(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """A stopped process is taken for dead and replaced; then it wakes up, with writes to make."""
    async with serving(model, oracle, tmp_path, *PAIR) as running:
        answer = running.submit(make_prompt(LONG, 1), max_tokens=8)
        await running.busy("prefill-0")
        old = running.workers["prefill-0"]
        old_ref = running.info("prefill-0").ref
        old.signal(signal.SIGSTOP)
        try:
            new_ref = (await running.restart("prefill-0")).ref
            assert new_ref.epoch == old_ref.epoch + 1
            running.check(await answer.end())
            others = [running.submit(make_prompt(200, n), max_tokens=8) for n in range(2, 8)]
            for other in others:  # met as the new epoch, which proves nothing about the old one
                running.check(await other.end())
            reply = await check_integrity(running.info("decode-0"))
            assert reply.is_clean
            num_resting = reply.load.num_blocks - reply.load.free_blocks
            assert num_resting >= LONG // running.info("decode-0").block_size
        finally:
            old.signal(signal.SIGCONT)
        # It learns that it has been replaced, and ends; that is the proof the blocks waited for.
        assert await old.wait() == 1
        await running.wait_at_rest()
        for n in range(4):
            running.check(await running.ask(make_prompt(300, 10 + n), max_tokens=6))
        await check_refused(running, old_ref, new_ref)
        await running.wait_at_rest()


async def check_refused(running: Serving, old: InstanceRef, new: InstanceRef) -> None:
    """By the new process when the old one is meant, by the peer when the old one calls."""
    decode = running.info("decode-0")
    request = make_request(make_prompt(40), max_tokens=4)
    ticket = TransferTicket(
        transfer_id=new_transfer_id(),
        request_id=request.request_id,
        source=old,
        target=decode.ref,
        first_block=0,
        target_block_ids=(1, 2, 3),
        num_tokens=40,
        layout_hash=decode.kv_layout.compat_hash,
        deadline_ns=request.deadline_ns,
    )
    message = prefill_pb2.PrefillRequest(
        request=request_to_pb(request), ticket=ticket_to_pb(ticket)
    )
    async with create_channel(new.address) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        updates = [update async for update in stub.Prefill(message)]
        assert [update.WhichOneof("update") for update in updates] == ["failed"]
        assert updates[0].failed.error.code == StaleEpochError.code
    layout = decode.kv_layout
    num_bytes = layout.block_bytes * decode.num_blocks
    connectors = (ConnectorOffer("nixl", b"an old agent"),)
    rank = RankEndpoint(0, connectors, 4096, num_bytes, decode.num_blocks, layout)
    offer = TransferOffer(PROTOCOL_VERSION, layout.compat_hash, old, (rank,))
    stale = transfer_pb2.HandshakeRequest(offer=offer_to_pb(offer))
    async with create_channel(decode.address) as channel:
        stub = transfer_pb2_grpc.TransferServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Handshake(stale)
    assert isinstance(error_from_rpc(refused.value), StaleEpochError)
