"""One stream per instance: whose fault touches whom."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
import pytest_asyncio

from isthmus.common.clock import SystemClock
from isthmus.common.errors import InstanceLostError, InternalError, IsthmusError
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.rpc import bind, create_server, stop_server
from isthmus.common.timeline import Timeline
from isthmus.common.types import (
    InstanceRef,
    Request,
    RouteAction,
    RouteDecision,
    SamplingParams,
    TokenLogprob,
)
from isthmus.gateway import decode_client
from isthmus.gateway.decode_client import DecodeClient, GenerationEnd
from isthmus.protos.v1 import decode_pb2 as pb
from tests.support.fake_decode import FakeDecode, Script
from tests.support.poll import poll_until


class RecordingSink:
    def __init__(self, fails_at_token: int | None = None) -> None:
        self.token_ids: list[int] = []
        self.end: GenerationEnd | None = None
        self.error: IsthmusError | None = None
        self.blamed = ""
        self._fails_at_token = fails_at_token

    @property
    def is_done(self) -> bool:
        return self.end is not None or self.error is not None

    def on_started(self, num_cached_tokens: int, failed_prefills: Sequence[str]) -> None:
        pass

    def on_timeline(self, timeline: Timeline) -> None:
        pass

    def on_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob],
    ) -> None:
        self.token_ids += token_ids
        if self._fails_at_token is not None and len(self.token_ids) > self._fails_at_token:
            raise ValueError("a bug")

    def on_finished(self, end: GenerationEnd) -> None:
        self.end = end

    def on_failed(self, error: IsthmusError, failed_instance: str) -> None:
        self.error, self.blamed = error, failed_instance


class FaultySink(RecordingSink):
    """Cannot even be told that it has failed."""

    def on_failed(self, error: IsthmusError, failed_instance: str) -> None:
        super().on_failed(error, failed_instance)
        raise ValueError("another bug")


@pytest_asyncio.fixture
async def fake() -> FakeDecode:
    return await FakeDecode(script=lambda _: Script((5, 6, 7))).start()


def request(name: str) -> Request:
    deadline_ns = SystemClock().now_ns() + 10**10
    return Request(RequestId(name), "tiny", (1, 2), SamplingParams(), 0, deadline_ns)


def decision(ref: InstanceRef) -> RouteDecision:
    return RouteDecision(DecisionId("d"), RequestId("r"), RouteAction.ADMIT, ref, None)


@pytest.mark.asyncio
async def test_requests_share_one_stream_and_each_gets_its_own(fake: FakeDecode) -> None:
    client = DecodeClient(SystemClock())
    sinks = [RecordingSink() for _ in range(20)]
    for number, sink in enumerate(sinks):
        client.submit(request(f"r{number}"), decision(fake.info.ref), sink)
    await poll_until(lambda: all(sink.is_done for sink in sinks))
    assert all(sink.token_ids == [5, 6, 7] for sink in sinks)
    assert len(client._streams) == 1
    assert client.num_requests() == 0
    await client.close()
    await fake.kill()


@pytest.mark.parametrize("kind", [RecordingSink, FaultySink])
@pytest.mark.asyncio
async def test_a_fault_of_one_request_does_not_touch_the_others(
    fake: FakeDecode, kind: type[RecordingSink]
) -> None:
    client = DecodeClient(SystemClock())
    bad, good = kind(fails_at_token=1), RecordingSink()
    client.submit(request("bad"), decision(fake.info.ref), bad)
    client.submit(request("good"), decision(fake.info.ref), good)
    await poll_until(lambda: bad.is_done and good.is_done)
    assert isinstance(bad.error, InternalError)
    assert good.error is None
    assert good.token_ids == [5, 6, 7]
    await client.close()
    await fake.kill()


@pytest.mark.asyncio
async def test_a_stream_that_cannot_be_written_to_fails_its_requests_and_begins_anew(
    fake: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> pb.GenerateRequest:
        raise ValueError("a bug")

    fake.script = lambda _: Script((5, 6), gate=asyncio.Event(), gate_at=1)
    client, ref, lost = DecodeClient(SystemClock()), fake.info.ref, RecordingSink()
    client.submit(request("lost"), decision(ref), lost)
    await poll_until(lambda: lost.token_ids)
    stream = client._streams[ref.instance_id]
    monkeypatch.setattr(stream._outgoing, "take", broken)
    client.abort(ref.instance_id, RequestId("lost"), "the writer waits for a message")
    client.submit(request("lost too"), decision(ref), lost)
    await poll_until(lambda: lost.is_done)
    assert isinstance(lost.error, InstanceLostError)
    assert "could not be written to" in lost.error.message
    await poll_until(lambda: client.is_live(ref.instance_id))
    fake.script, again = (lambda _: Script((5, 6, 7))), RecordingSink()
    client.submit(request("again"), decision(ref), again)
    await poll_until(lambda: again.is_done)
    assert again.token_ids == [5, 6, 7]
    await client.close()
    await fake.kill()


@pytest.mark.asyncio
async def test_a_broken_stream_fails_all_its_requests_at_once(fake: FakeDecode) -> None:
    fake.script = lambda _: Script((5, 6), gate=asyncio.Event(), gate_at=1)
    client = DecodeClient(SystemClock())
    sinks = [RecordingSink() for _ in range(5)]
    for number, sink in enumerate(sinks):
        client.submit(request(f"r{number}"), decision(fake.info.ref), sink)
    await poll_until(lambda: all(sink.token_ids for sink in sinks))
    assert client.silent_s(fake.info.instance_id) >= 0
    await fake.kill()
    await poll_until(lambda: all(sink.is_done for sink in sinks))
    assert all(isinstance(sink.error, InstanceLostError) for sink in sinks)
    assert {sink.blamed for sink in sinks} == {"decode-0"}
    with pytest.raises(InstanceLostError, match="out of reach"):
        client.submit(request("late"), decision(fake.info.ref), RecordingSink())
    await client.close()


@pytest.mark.asyncio
async def test_a_stream_that_stops_for_good_fails_all_its_requests(
    fake: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise ValueError("not foreseen")

    client, sink, other = DecodeClient(SystemClock()), RecordingSink(), RecordingSink()
    with monkeypatch.context() as patch:
        patch.setattr(decode_client._Stream, "_dispatch", breaks)
        client.submit(request("r"), decision(fake.info.ref), sink)
        await poll_until(lambda: sink.is_done)
    assert isinstance(sink.error, InstanceLostError)
    # The next request has a stream of its own.
    await poll_until(lambda: not client.is_broken(fake.info.instance_id))
    client.submit(request("again"), decision(fake.info.ref), other)
    await poll_until(lambda: client.is_live(fake.info.instance_id))
    await client.close()
    await fake.kill()


@pytest.mark.asyncio
async def test_an_address_of_another_role_by_now_is_an_error_soon() -> None:
    server = create_server()
    ref = InstanceRef(InstanceId("decode-9"), 1, await bind(server, "127.0.0.1", 0))
    await server.start()
    client, sink = DecodeClient(SystemClock()), RecordingSink()
    client.submit(request("r"), decision(ref), sink)
    await poll_until(lambda: sink.is_done)
    assert isinstance(sink.error, InstanceLostError)
    assert "it has another role or version" in sink.error.message
    await client.close()
    await stop_server(server, 0)


@pytest.mark.asyncio
async def test_nobody_there_is_an_error_soon(free_port: int) -> None:
    client = DecodeClient(SystemClock())
    ref = InstanceRef(InstanceId("decode-9"), 1, f"127.0.0.1:{free_port}")
    sink = RecordingSink()
    client.submit(request("r"), decision(ref), sink)
    await poll_until(lambda: sink.is_done)
    assert isinstance(sink.error, InstanceLostError)
    assert not client.is_live(ref.instance_id)
    await client.close()


@pytest.mark.asyncio
async def test_a_newer_epoch_replaces_the_stream_and_an_older_one_is_refused(
    fake: FakeDecode,
) -> None:
    fake.script = lambda _: Script((5, 6), gate=asyncio.Event(), gate_at=1)
    client = DecodeClient(SystemClock())
    old = fake.info.ref
    waiting = RecordingSink()
    client.submit(request("old"), decision(old), waiting)
    new = InstanceRef(old.instance_id, old.epoch + 1, old.address)
    client.follow([new])
    await poll_until(lambda: waiting.is_done)
    assert isinstance(waiting.error, InstanceLostError)
    with pytest.raises(InstanceLostError, match="restarted"):
        client.submit(request("late"), decision(old), RecordingSink())
    await client.close()
    await fake.kill()


@pytest.mark.asyncio
async def test_an_aborted_request_hears_nothing_more(fake: FakeDecode) -> None:
    gate = asyncio.Event()
    fake.script = lambda _: Script((5, 6), gate=gate, gate_at=1)
    client = DecodeClient(SystemClock())
    sink = RecordingSink()
    client.submit(request("r"), decision(fake.info.ref), sink)
    await poll_until(lambda: bool(sink.token_ids))
    client.abort(fake.info.instance_id, RequestId("r"), "enough")
    client.abort(fake.info.instance_id, RequestId("r"), "twice is once")
    await poll_until(lambda: bool(fake.aborted))
    gate.set()
    other = RecordingSink()
    client.submit(request("other"), decision(fake.info.ref), other)
    await poll_until(lambda: other.is_done)
    assert fake.aborted == ["r"]
    assert sink.token_ids == [5]
    assert not sink.is_done
    await client.close()
    await fake.kill()


@pytest.mark.asyncio
async def test_requests_do_not_wait_for_one_that_takes_connections_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_client, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ref = InstanceRef(InstanceId("mute"), 1, f"127.0.0.1:{mute.getsockname()[1]}")
        client, sink = DecodeClient(SystemClock()), RecordingSink()
        client.follow([ref])
        client.submit(request("r"), decision(ref), sink)
        await poll_until(lambda: sink.is_done)
        assert isinstance(sink.error, InstanceLostError)
        assert "in time" in sink.error.message
        assert sink.blamed == "mute"
        await client.close()
