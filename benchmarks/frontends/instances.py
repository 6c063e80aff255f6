"""A prefill and a decode instance of ours without a model, and a registry that names them.

``python -m benchmarks.frontends.instances`` serves until its stdin is closed; the first line that
it prints has the addresses, as JSON. The decode instance is the real service over an engine that
computes nothing: all tokens of a request at once, or with ``--step-ms`` the first at once and then
one a step, those of every running request in the same step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import uvloop

from isthmus.common.cluster import LatencyModel, Role
from isthmus.common.registry.base import instance_key
from isthmus.common.registry.embedded import RegistryServer
from isthmus.common.rpc import bind, create_server
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import FinishReason, Request, RouteDecision, Usage
from isthmus.decode_worker.events import Finished, Outbox, Started, TokenDelta
from isthmus.decode_worker.service import DecodeServicer
from isthmus.decode_worker.worker import DecodeWorker
from isthmus.protos.convert.instances import info_to_pb
from isthmus.protos.v1 import decode_pb2_grpc, instance_pb2_grpc
from tests.support.fake_decode import FakeDecode, InstanceServicer


@dataclass(slots=True)
class Running:
    request: Request
    decision: RouteDecision
    outbox: Outbox
    timeline: Timeline
    num_sent: int = 0


class InstantEngine:
    """What a ``DecodeServicer`` needs of a worker. ``run`` makes the steps."""

    def __init__(self, token_ids: list[int], step_s: float) -> None:
        self._token_ids = token_ids
        self._step_s = step_s
        self._running: dict[str, Running] = {}
        self._has_work = asyncio.Event()

    def submit(self, request: Request, decision: RouteDecision, outbox: Outbox) -> None:
        now_ns = time.time_ns()
        events = (Event.ADMITTED, Event.PREFILL_QUEUED, Event.SCHEDULED, Event.PREFILLED)
        running = Running(request, decision, outbox, Timeline(dict.fromkeys(events, now_ns)))
        outbox.put(Started(request.request_id, 0))
        # A pair's first token is the prefill instance's: it waits for no step of the other's.
        if not self._emit(running, 1 if self._step_s else request.sampling.max_tokens):
            self._running[request.request_id] = running
            self._has_work.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(self._step_s)
            for request_id, running in list(self._running.items()):
                if self._emit(running, 1):
                    del self._running[request_id]
            if not self._running:
                self._has_work.clear()

    def _emit(self, running: Running, count: int) -> bool:
        """Whether these were the last."""
        request, now_ns = running.request, time.time_ns()
        begin, limit = running.num_sent, request.sampling.max_tokens
        end = min(begin + count, limit)
        if begin == 0:
            running.timeline.mark(Event.KV_READY, now_ns)
            running.timeline.mark(Event.FIRST_TOKEN, now_ns)
        if end > 1:
            running.timeline.mark(Event.SECOND_TOKEN, now_ns)
        size = len(self._token_ids)
        tokens = tuple(self._token_ids[i % size] for i in range(begin, end))
        timeline = running.timeline if begin < 2 else None  # as a real instance does
        running.outbox.put(TokenDelta(request.request_id, tokens, timeline=timeline))
        running.num_sent = end
        if end < limit:
            return False
        running.outbox.put(
            Finished(
                request_id=request.request_id,
                reason=FinishReason.LENGTH,
                stop_token_id=None,
                usage=Usage(request.num_prompt_tokens, end),
                timeline=running.timeline,
                local_reason=running.decision.local_reason,
                transferred_bytes=0,
            )
        )
        return True


def own_latency(step_s: float) -> LatencyModel:
    """What these instances take: a router that waits for time that nobody needs measures that."""
    return LatencyModel(
        prefill_base=0.1,
        prefill_token=0.0001,
        decode_base=max(1e3 * step_s, 0.1),
        decode_seq=0.0,
    )


async def serve(cluster: str, model: str, token_ids: list[int], step_s: float) -> None:
    registry = RegistryServer()
    decode, prefill = (
        FakeDecode(
            instance_id=name,
            role=role,
            model=model,
            block_size=16,
            max_model_len=8192,
            num_blocks=65_536,
            max_num_batched_tokens=8192,
            max_num_seqs=1024,
            latency=own_latency(step_s),
            report_period_s=1.0,  # as an idle instance does
        )
        for name, role in (("decode-0", Role.DECODE), ("prefill-0", Role.PREFILL))
    )
    engine = InstantEngine(token_ids, step_s)
    server = create_server()
    servicer = DecodeServicer(cast("DecodeWorker", engine))
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    instance_pb2_grpc.add_InstanceServiceServicer_to_server(InstanceServicer(decode), server)
    decode.address = await bind(server, "127.0.0.1", 0)
    await server.start()
    await prefill.start()
    address = await registry.start("127.0.0.1", 0)
    for fake in (decode, prefill):
        record = info_to_pb(fake.info).SerializeToString()
        await registry.registry.put(instance_key(cluster, fake.instance_id), record)
    steps = asyncio.create_task(engine.run())
    print(json.dumps({"registry": address, "decode": decode.address}), flush=True)
    try:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        steps.cancel()
        await registry.stop()
        await prefill.kill()
        await server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--token-ids", type=int, nargs="+", required=True)
    parser.add_argument("--step-ms", type=float, default=0.0)
    args = parser.parse_args()
    uvloop.run(serve(args.cluster, args.model, args.token_ids, args.step_ms / 1e3))


if __name__ == "__main__":
    main()
