"""What a gateway does with a decode instance, and what a test wants to know about instances."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc.aio

from isthmus.common.cluster import InstanceInfo
from isthmus.common.ids import DecisionId, RequestId, new_decision_id, new_request_id
from isthmus.common.rpc import create_channel
from isthmus.common.types import (
    LocalPrefillReason,
    Request,
    RouteAction,
    RouteDecision,
    SamplingParams,
)
from isthmus.protos.convert.decisions import decision_to_pb
from isthmus.protos.convert.requests import request_to_pb
from isthmus.protos.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
)


def make_request(
    tokens: Sequence[int],
    *,
    timeout_ms: int = 30_000,
    num_resumed: int = 0,
    cache_salt: str = "",
    **sampling: object,
) -> Request:
    settings: dict[str, object] = {"temperature": 0.0, "max_tokens": 8, **sampling}
    now_ns = time.time_ns()
    return Request(
        request_id=new_request_id(),
        model="tiny",
        token_ids=tuple(tokens),
        sampling=SamplingParams(**settings),  # type: ignore[arg-type]
        arrival_ns=now_ns,
        deadline_ns=now_ns + timeout_ms * 1_000_000,
        num_resumed_tokens=num_resumed,
        cache_salt=cache_salt,
    )


def decide(
    decode: InstanceInfo,
    prefill: InstanceInfo | None,
    request_id: RequestId,
    alternate: InstanceInfo | None = None,
) -> RouteDecision:
    return RouteDecision(
        decision_id=DecisionId(new_decision_id()),
        request_id=request_id,
        action=RouteAction.ADMIT,
        decode=decode.ref,
        prefill=prefill.ref if prefill is not None else None,
        alternate=alternate.ref if alternate is not None else None,
        local_reason=LocalPrefillReason.NONE if prefill else LocalPrefillReason.MIXED_ROLE,
    )


class Answer:
    """Everything that came for one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[common_pb2.TokenLogprob] = []
        self.prompt_logprobs: list[common_pb2.TokenLogprob] = []
        self.early_timelines: list[dict[str, int]] = []
        self.started: decode_pb2.Started | None = None
        self.finished: decode_pb2.Finished | None = None
        self.failed: decode_pb2.Failed | None = None
        self.ended = asyncio.Event()
        self.has_token = asyncio.Event()

    async def end(self, timeout_s: float = 60.0) -> Answer:
        await asyncio.wait_for(self.ended.wait(), timeout_s)
        return self

    @property
    def timeline(self) -> dict[str, int]:
        assert self.finished is not None, self.failed
        return {item.event: item.at_unix_ns for item in self.finished.timeline.events}


class GatewayStub:
    """One Generate stream to one decode instance, as a gateway would hold it."""

    def __init__(self, decode: InstanceInfo) -> None:
        self.decode = decode
        self.channel = create_channel(decode.address)
        self.answers: dict[str, Answer] = {}
        self._call: grpc.aio.StreamStreamCall | None = None
        self._reader: asyncio.Task[None] | None = None
        self.num_messages = 0
        self._writing = asyncio.Lock()  # one write at a time, as gRPC wants it

    async def __aenter__(self) -> GatewayStub:
        self._call = decode_pb2_grpc.DecodeServiceStub(self.channel).Generate()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._call is not None
        assert self._reader is not None
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.channel.close()

    async def _read(self) -> None:
        assert self._call is not None
        async for message in self._call:
            self.num_messages += 1
            for started in message.started:
                self.answers[started.request_id].started = started
            for delta in message.deltas:
                answer = self.answers[delta.request_id]
                answer.tokens.extend(delta.token_ids)
                answer.logprobs.extend(delta.logprobs)
                answer.prompt_logprobs.extend(delta.prompt_logprobs)
                if delta.HasField("timeline"):
                    events = delta.timeline.events
                    answer.early_timelines.append({e.event: e.at_unix_ns for e in events})
                answer.has_token.set()
            for finished in message.finished:
                self.answers[finished.request_id].finished = finished
                self.answers[finished.request_id].ended.set()
            for failed in message.failed:
                self.answers[failed.request_id].failed = failed
                self.answers[failed.request_id].ended.set()

    async def submit(
        self,
        request: Request,
        prefill: InstanceInfo | None,
        alternate: InstanceInfo | None = None,
    ) -> Answer:
        assert self._call is not None
        answer = self.answers[request.request_id] = Answer(request)
        decision = decide(self.decode, prefill, request.request_id, alternate)
        submit = decode_pb2.Submit(
            request=request_to_pb(request), decision=decision_to_pb(decision)
        )
        await self._write(decode_pb2.GenerateRequest(submits=[submit]))
        return answer

    async def run(
        self,
        request: Request,
        prefill: InstanceInfo | None,
        alternate: InstanceInfo | None = None,
    ) -> Answer:
        return await (await self.submit(request, prefill, alternate)).end()

    async def abort(self, answer: Answer) -> None:
        abort = decode_pb2.Abort(request_id=answer.request.request_id, reason="test")
        await self._write(decode_pb2.GenerateRequest(aborts=[abort]))

    async def _write(self, message: decode_pb2.GenerateRequest) -> None:
        assert self._call is not None
        async with self._writing:
            await self._call.write(message)


async def check_integrity(info: InstanceInfo) -> instance_pb2.CheckIntegrityResponse:
    async with create_channel(info.address) as channel:
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        return await stub.CheckIntegrity(instance_pb2.CheckIntegrityRequest(), timeout=60)


async def wait_idle(*infos: InstanceInfo, timeout_s: float = 60.0) -> None:
    """Waits until nothing of any request is left in these instances and their pools are whole."""
    for info in infos:
        ends = time.monotonic() + timeout_s
        while True:
            reply = await check_integrity(info)
            load = reply.load
            is_idle = (
                load.free_blocks == load.num_blocks
                and not (load.running_seqs or load.waiting_seqs or load.held_blocks)
                and not reply.sessions_by_state
            )
            if is_idle:
                assert reply.is_clean, reply.problem
                break
            assert time.monotonic() < ends, f"{info.instance_id} did not become idle:\n{reply}"
            await asyncio.sleep(0.05)
