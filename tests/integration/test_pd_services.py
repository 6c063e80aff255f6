"""What every worker serves beside its role's own service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from isthmus.common.cluster import InstanceState, Role
from isthmus.common.errors import HandshakeError, LayoutMismatchError
from isthmus.common.kv_events import BlocksStored
from isthmus.common.rpc import create_channel, error_from_rpc
from isthmus.common.transfer import PROTOCOL_VERSION
from isthmus.protos.convert.instances import info_from_pb, layout_to_pb, load_from_pb, ref_to_pb
from isthmus.protos.convert.kv_events import kv_batch_from_pb
from isthmus.protos.v1 import (
    common_pb2,
    instance_pb2,
    instance_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from isthmus.worker.lifecycle import ExitCode
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import GatewayStub, make_request
from tests.support.local_cluster import LocalCluster, LocalWorker
from tests.support.poll import poll_until

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def start_mixed() -> AsyncIterator[tuple[LocalCluster, LocalWorker, grpc.aio.Channel]]:
    async with LocalCluster() as cluster:
        worker = await cluster.start(Role.MIXED, "mixed-0")
        assert worker.info is not None
        async with create_channel(worker.info.address) as channel:
            yield cluster, worker, channel


async def health_of(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)).status)


async def test_the_record_in_the_registry_is_what_the_worker_says_of_itself() -> None:
    async with start_mixed() as (_, worker, channel):
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        reply = await stub.GetInfo(instance_pb2.GetInfoRequest(), timeout=60)
        info = info_from_pb(reply.info)
        assert info == worker.info
        assert (info.role, info.state, info.epoch) == (Role.MIXED, InstanceState.READY, 1)
        assert worker.engine is not None
        assert info.num_blocks == worker.engine.num_blocks
        assert info.latency.prefill_ms(64) > 0
        assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_load_is_streamed_when_it_changes() -> None:
    async with start_mixed() as (_, worker, channel):
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        reports = []

        async def watch() -> None:
            call = stub.WatchLoad(instance_pb2.WatchLoadRequest(interval_ms=10))
            async for message in call:
                reports.append(load_from_pb(message.report))  # noqa: PERF401 (no end)

        watcher = asyncio.create_task(watch())
        assert worker.info is not None
        async with GatewayStub(worker.info) as gateway:
            await poll_until(lambda: len(reports) == 1)
            worker.model.gate.clear()
            answer = await gateway.submit(make_request(make_prompt(50)), None)
            # A first report may still have it in line.
            await poll_until(lambda: reports[-1].running_seqs == 1)
            assert reports[-1].waiting_tokens > 0
            worker.model.gate.set()
            await answer.end()
            await poll_until(lambda: reports[-1].steps > 5 and reports[-1].running_seqs == 0)
        assert reports[-1].free_blocks == reports[-1].num_blocks
        assert [report.seq for report in reports] == sorted({report.seq for report in reports})
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def test_kv_events_begin_with_a_snapshot_and_go_on_without_gaps() -> None:
    async with start_mixed() as (_, worker, channel):
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        batches = []

        async def watch() -> None:
            call = stub.WatchKvEvents(instance_pb2.WatchKvEventsRequest(epoch=1, from_seq=0))
            async for message in call:
                batches.append(kv_batch_from_pb(message.batch))  # noqa: PERF401 (no end)

        assert worker.info is not None
        async with GatewayStub(worker.info) as gateway:
            await gateway.run(make_request(make_prompt(20)), None)
            watcher = asyncio.create_task(watch())
            await poll_until(lambda: len(batches) == 1)
            await gateway.run(make_request(make_prompt(20, salt=1)), None)
            await poll_until(lambda: len(batches) > 1)
        assert [batch.is_snapshot for batch in batches][:2] == [True, False]
        for before, after in pairwise(batches):
            assert after.first_seq == before.next_seq
        stored = [e for b in batches for e in b.events if isinstance(e, BlocksStored)]
        assert worker.engine is not None
        assert {h for event in stored for h in event.hashes} == set(worker.engine.cached_hashes())
        flushed = await stub.FlushCache(instance_pb2.FlushCacheRequest(), timeout=60)
        assert flushed.num_blocks > 0
        assert worker.engine.cached_hashes() == []
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def test_a_drain_call_tells_its_progress_until_the_worker_has_stopped() -> None:
    async with start_mixed() as (cluster, worker, channel):
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        assert worker.info is not None
        async with GatewayStub(worker.info) as gateway:
            worker.model.gate.clear()
            answer = await gateway.submit(make_request(make_prompt(9)), None)
            await poll_until(lambda: worker.model.num_held > 0)
            reports = []
            async for report in stub.Drain(instance_pb2.DrainRequest(timeout_ms=15_000)):
                reports.append(report)
                worker.model.gate.set()
            assert reports[0].running_requests == 1
            assert reports[-1].running_requests == 0
            assert reports[-1].state == common_pb2.INSTANCE_STATE_STOPPED
            assert answer.finished is not None
        assert worker.task is not None
        assert await asyncio.wait_for(worker.task, 60) is ExitCode.OK
        assert await cluster.find("mixed-0") is None


async def test_work_that_outlasts_a_drain_is_told_to_go_elsewhere() -> None:
    async with start_mixed() as (_, worker, _channel):
        assert worker.info is not None
        async with GatewayStub(worker.info) as gateway:
            worker.model.gate.clear()
            answer = await gateway.submit(make_request(make_prompt(9)), None)
            await poll_until(lambda: worker.model.num_held > 0)
            worker.stop.drain("test", 50)
            await answer.end()
            assert answer.failed is not None
            assert answer.failed.error.code == "draining"
            assert answer.failed.error.retryable
            worker.model.gate.set()


async def test_a_broken_pool_is_named() -> None:
    async with start_mixed() as (_, worker, channel):
        assert worker.engine is not None

        def broken() -> None:
            raise AssertionError("block 3 is used and free")

        worker.engine.check_integrity = broken  # type: ignore[method-assign]
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        reply = await stub.CheckIntegrity(instance_pb2.CheckIntegrityRequest(), timeout=60)
        assert not reply.is_clean
        assert reply.problem == "block 3 is used and free"


async def test_a_handshake_with_another_layout_is_refused_by_name() -> None:
    async with LocalCluster() as cluster:
        worker = await cluster.start(Role.PREFILL, "prefill-0")
        other = await cluster.start(Role.DECODE, "decode-0", seed=1)
        assert worker.info is not None
        assert other.info is not None
        async with create_channel(worker.info.address) as channel:
            stub = transfer_pb2_grpc.TransferServiceStub(channel)
            offer = transfer_pb2.TransferOffer(
                protocol_version=PROTOCOL_VERSION,
                layout_hash=other.info.kv_layout.compat_hash,
                instance=ref_to_pb(other.info.ref),
                ranks=[transfer_pb2.RankEndpoint(layout=layout_to_pb(other.info.kv_layout))],
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Handshake(transfer_pb2.HandshakeRequest(offer=offer), timeout=60)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            error = error_from_rpc(caught.value)
            assert isinstance(error, LayoutMismatchError)
            assert "tiny-0" in error.message
            assert "tiny-1" in error.message
            offer.protocol_version = 99
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Handshake(transfer_pb2.HandshakeRequest(offer=offer), timeout=60)
            assert isinstance(error_from_rpc(caught.value), HandshakeError)


async def test_services_can_be_listed() -> None:
    async with start_mixed() as (_, _worker, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]), timeout=60)
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        assert {
            "isthmus.protos.v1.DecodeService",
            "isthmus.protos.v1.InstanceService",
            "isthmus.protos.v1.TransferService",
            "grpc.health.v1.Health",
        } <= names
        call.cancel()


async def test_a_worker_asked_to_stop_while_it_starts_just_leaves() -> None:
    async with LocalCluster() as cluster:
        worker = cluster.launch(Role.DECODE, "decode-0")
        worker.stop.drain("test")
        assert worker.task is not None
        assert await asyncio.wait_for(worker.task, 60) is ExitCode.OK
        assert await cluster.find("decode-0") is None
