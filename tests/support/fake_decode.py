"""A decode instance without a model: a real gRPC server that plays scripted token streams.

``FakeDecode.script`` maps a submitted request to a ``Script``; by default the output is fixed. It
honours stop tokens, ``max_tokens`` and resumed tokens as a real instance would, and records what it
was sent and told to abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import grpc.aio

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import InstanceInfo, InstanceState, LatencyModel, LoadReport, Role
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.rpc import bind, create_server
from isthmus.common.timeline import Event, Timeline
from isthmus.protos.convert.errors import error_to_pb
from isthmus.protos.convert.instances import info_to_pb, load_to_pb
from isthmus.protos.convert.requests import timeline_to_pb
from isthmus.protos.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
)

BLOCK_SIZE = 4
MODEL = "tiny"


# What a decode instance says of every request, in milliseconds after its arrival.
LIFE_MS = {
    Event.PREFILLED: 1,
    Event.FIRST_TOKEN: 2,
    Event.KV_READY: 4,
    Event.SECOND_TOKEN: 7,
}


@dataclass(frozen=True)
class Script:
    """What one request gets. ``gate`` is awaited before token ``gate_at`` is sent."""

    token_ids: Sequence[int]
    error: IsthmusError | None = None  # instead of token ``error_at``, or of the end
    error_at: int = 0
    failed_instance: str = ""
    gate: asyncio.Event | None = None
    gate_at: int = 0
    num_cached_tokens: int = 0
    local_reason: str | None = None  # None = as the decision says
    tokens_per_step: int = 1


@dataclass
class FakeDecode:
    instance_id: str = "decode-0"
    role: Role = Role.DECODE
    epoch: int = 1
    model: str = MODEL
    block_size: int = BLOCK_SIZE
    max_model_len: int = 512
    num_blocks: int = 1024
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 64
    latency: LatencyModel = field(default_factory=LatencyModel)
    report_period_s: float = 0.02  # between load reports, however often they are asked for
    script: Callable[[common_pb2.Request], Script] = lambda _: Script((3 + ord("h"), 3 + ord("i")))
    submitted: list[decode_pb2.Submit] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    address: str = ""
    _server: grpc.aio.Server | None = None

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(
            instance_id=InstanceId(self.instance_id),
            role=self.role,
            state=InstanceState.READY,
            epoch=self.epoch,
            address=self.address,
            metrics_address="",
            model=self.model,
            model_path="",
            kv_layout=KvLayout("tiny", 1, 1, 8, self.block_size, "float32"),
            num_blocks=self.num_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            connector="local",
            latency=self.latency,
        )

    def load_report(self, seq: int = 1) -> LoadReport:
        num_blocks = self.num_blocks
        return LoadReport(
            InstanceId(self.instance_id),
            self.epoch,
            seq,
            0,
            num_blocks=num_blocks,
            free_blocks=num_blocks,
        )

    @property
    def requests(self) -> list[common_pb2.Request]:
        return [submit.request for submit in self.submitted]

    @property
    def is_up(self) -> bool:
        return self._server is not None

    async def start(self) -> FakeDecode:
        self._server = create_server()
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(_DecodeServicer(self), self._server)
        instance_pb2_grpc.add_InstanceServiceServicer_to_server(
            InstanceServicer(self), self._server
        )
        host, _, port = self.address.rpartition(":")
        self.address = await bind(self._server, host or "127.0.0.1", int(port or 0))
        await self._server.start()
        return self

    async def kill(self) -> None:
        """Every stream breaks at once, as when the process dies."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)


class _DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, fake: FakeDecode) -> None:
        self._fake = fake

    async def Generate(  # noqa: N802
        self,
        request_iterator: AsyncIterator[decode_pb2.GenerateRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        answers: asyncio.Queue[decode_pb2.GenerateResponse | None] = asyncio.Queue()
        running: dict[str, asyncio.Task[None]] = {}

        async def read() -> None:
            async for message in request_iterator:
                for submit in message.submits:
                    self._fake.submitted.append(submit)
                    play = self._play(submit, answers)
                    running[submit.request.request_id] = asyncio.create_task(play)
                for abort in message.aborts:
                    self._fake.aborted.append(abort.request_id)
                    if task := running.pop(abort.request_id, None):
                        task.cancel()
            answers.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            await context.send_initial_metadata(())
            while (answer := await answers.get()) is not None:
                yield answer
        finally:
            for task in (reader, *running.values()):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _play(
        self,
        submit: decode_pb2.Submit,
        answers: asyncio.Queue[decode_pb2.GenerateResponse | None],
    ) -> None:
        request = submit.request
        script = self._fake.script(request)
        name, sampling = request.request_id, request.sampling
        started = decode_pb2.Started(request_id=name, num_cached_tokens=script.num_cached_tokens)
        answers.put_nowait(decode_pb2.GenerateResponse(started=[started]))
        token_ids = list(script.token_ids)[: sampling.max_tokens]
        ends = [i for i, token in enumerate(token_ids) if token in sampling.stop_token_ids]
        ends = [i for i in ends if i + 1 > sampling.min_tokens]
        reason = common_pb2.FINISH_REASON_LENGTH
        if ends:
            token_ids = token_ids[: ends[0] + 1]
            reason = common_pb2.FINISH_REASON_STOP
        position = request.num_resumed_tokens
        while position < len(token_ids):
            stop = min(position + script.tokens_per_step, len(token_ids))
            if script.gate is not None and position <= script.gate_at < stop:
                await script.gate.wait()
            if script.error is not None and position <= script.error_at < stop:
                answers.put_nowait(_failed(name, script))
                return
            delta = _delta(request, token_ids[position:stop], is_first=position == 0)
            answers.put_nowait(decode_pb2.GenerateResponse(deltas=[delta]))
            position = stop
            await asyncio.sleep(0)
        if script.error is not None and script.error_at >= len(token_ids):
            answers.put_nowait(_failed(name, script))
            return
        finished = decode_pb2.Finished(
            request_id=name,
            reason=reason,
            usage=common_pb2.Usage(
                num_prompt_tokens=len(request.token_ids) - request.num_resumed_tokens,
                num_output_tokens=len(token_ids),
                num_cached_tokens=script.num_cached_tokens,
            ),
            timeline=timeline_to_pb(
                Timeline(
                    {
                        event: request.arrival_unix_ns + milliseconds * NS_PER_MS
                        for event, milliseconds in LIFE_MS.items()
                    }
                )
            ),
            local_reason=script.local_reason or submit.decision.local_reason,
            transferred_bytes=128,
        )
        if ends:
            finished.stop_token_id = token_ids[-1]
        answers.put_nowait(decode_pb2.GenerateResponse(finished=[finished]))


class InstanceServicer(instance_pb2_grpc.InstanceServiceServicer):
    def __init__(self, fake: FakeDecode) -> None:
        self._fake = fake

    async def GetInfo(  # noqa: N802
        self, request: instance_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> instance_pb2.GetInfoResponse:
        return instance_pb2.GetInfoResponse(info=info_to_pb(self._fake.info))

    async def WatchLoad(  # noqa: N802
        self, request: instance_pb2.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        seq = 0
        while True:
            seq += 1
            report = replace(self._fake.load_report(), seq=seq)
            yield instance_pb2.WatchLoadResponse(report=load_to_pb(report))
            await asyncio.sleep(max(request.interval_ms / 1000, self._fake.report_period_s))

    async def WatchKvEvents(  # noqa: N802
        self, request: instance_pb2.WatchKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[instance_pb2.WatchKvEventsResponse]:
        yield instance_pb2.WatchKvEventsResponse(
            batch=common_pb2.KvEventBatch(
                instance_id=self._fake.instance_id, epoch=self._fake.epoch, is_snapshot=True
            )
        )
        await asyncio.get_running_loop().create_future()


def _failed(name: str, script: Script) -> decode_pb2.GenerateResponse:
    assert script.error is not None
    failed = decode_pb2.Failed(
        request_id=name,
        error=error_to_pb(script.error),
        failed_instance=script.failed_instance,
    )
    return decode_pb2.GenerateResponse(failed=[failed])


def _delta(
    request: common_pb2.Request, token_ids: Sequence[int], *, is_first: bool
) -> decode_pb2.TokenDelta:
    sampling = request.sampling
    delta = decode_pb2.TokenDelta(request_id=request.request_id, token_ids=token_ids)
    if is_first:
        happened = Timeline({Event.PREFILLED: request.arrival_unix_ns + 1_000_000})
        delta.timeline.CopyFrom(timeline_to_pb(happened))
    if sampling.HasField("logprobs"):
        delta.logprobs.extend(_logprob(token, sampling.logprobs) for token in token_ids)
    if sampling.HasField("prompt_logprobs") and is_first:
        delta.prompt_logprobs.extend(
            _logprob(token, sampling.prompt_logprobs) for token in request.token_ids[1:]
        )
    return delta


def _logprob(token_id: int, num_top: int) -> common_pb2.TokenLogprob:
    top = [
        common_pb2.AlternativeToken(token_id=token_id + k, logprob=-0.5 - k) for k in range(num_top)
    ]
    return common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5, rank=0, top=top)
