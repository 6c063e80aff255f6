"""What an operator gets: one log line per request, and metrics that agree with the client."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from isthmus.common import metrics
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, running_gateway
from tests.support.poll import poll_until

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def fake() -> FakeDecode:
    return FakeDecode()


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, fake: FakeDecode) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, [fake]) as running:
        yield running


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_each_request_ends_with_one_line_and_its_stages(
    gateway: RunningGateway, fake: FakeDecode, stream: bool
) -> None:
    fake.script = lambda _: Script(gateway.ids("the one"), num_cached_tokens=4)
    with capture_logs() as lines:
        async with gateway.http() as client:
            body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
            begin = time.monotonic()
            await client.post("/v1/chat/completions", json=body, headers={"x-request-id": "abc"})
            wall_ms = 1000 * (time.monotonic() - begin)
    (line,) = [line for line in lines if line["event"] == "request ended"]
    assert line["request_id"].startswith("abc.")
    assert line["outcome"] == "good"
    assert line["decode"] == "decode-0"
    assert line["cached_tokens"] == 4
    assert line["output_tokens"] == 2
    assert line["transferred_bytes"] == 128
    parts = [line[f"{stage}_ms"] for stage in ("tokenise", "route", "first_flush")]
    assert all(part >= 0 for part in parts)
    assert 0 <= line["last_flush_ms"] < line["e2e_ms"]
    assert 0 < line["ttft_ms"] <= line["e2e_ms"] <= wall_ms


@pytest.mark.asyncio
async def test_a_request_ended_by_a_stop_string_has_its_stages_too(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    """The instance is told to abort: nothing more comes from it."""
    fake.script = lambda _: Script(gateway.ids("the one two"), gate=asyncio.Event(), gate_at=2)
    with capture_logs() as lines:
        async with gateway.http() as client:
            body = {"model": "tiny", "prompt": "x", "stop": " one", "stream": True}
            await client.post("/v1/completions", json=body)
        await poll_until(lambda: len(fake.aborted) == 1)
    (line,) = [line for line in lines if line["event"] == "request ended"]
    assert line["outcome"] == "good"
    assert line["first_flush_ms"] >= 0  # from the instance's first token to the client


@pytest.mark.asyncio
async def test_a_refused_request_has_its_line_too(gateway: RunningGateway) -> None:
    labels = {"slo_class": "default", "tenant": "anonymous", "outcome": "invalid"}
    before = metrics.REQUESTS.labels(**labels)
    count = before._value.get()
    with capture_logs() as lines:
        async with gateway.http() as client:
            body = {"model": "tiny", "messages": MESSAGES, "bogus": 1}
            await client.post("/v1/chat/completions", json=body)
    (line,) = [line for line in lines if line["event"] == "request ended"]
    assert (line["outcome"], line["code"]) == ("invalid", "unsupported_parameter")
    assert line["param"] == "bogus"
    assert before._value.get() == count + 1


@pytest.mark.asyncio
async def test_metrics_count_the_request_once(gateway: RunningGateway, fake: FakeDecode) -> None:
    fake.script = lambda _: Script(gateway.ids("the one two"), num_cached_tokens=4)

    async def figures() -> dict[str, float]:
        async with gateway.http() as client:
            text = (await client.get("/metrics")).text
        rows = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in rows}

    before = await figures()
    async with gateway.http() as client:
        body = {"model": "tiny", "prompt": "x y z", "stream": True, "n": 2}
        await client.post("/v1/completions", json=body)
    after = await figures()

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    num_prompt = len(fake.requests[0].token_ids)
    labels = 'slo_class="default",tenant="anonymous"'
    assert gained(f'isthmus_requests_total{{outcome="good",{labels}}}') == 1
    assert gained(f"isthmus_requests_offered_total{{{labels}}}") == 1
    assert 0 < after[f"isthmus_goodput_ratio{{{labels}}}"] <= 1
    assert gained("isthmus_prompt_tokens_total") == num_prompt
    assert gained("isthmus_cached_tokens_total") == 4
    assert gained("isthmus_output_tokens_total") == 6
    assert gained('isthmus_ttft_seconds_count{slo_class="default"}') == 1
    assert gained('isthmus_tpot_seconds_count{slo_class="default"}') == 1
    assert gained("isthmus_itl_seconds_count") == 4
    assert gained('isthmus_second_token_gap_seconds_count{slo_class="default"}') == 2
    assert after["isthmus_requests_inflight"] == 0


@pytest.mark.asyncio
async def test_small_writes_are_not_delayed(gateway: RunningGateway) -> None:
    """TCP_NODELAY: a token must not wait for the acknowledgement of the one before it."""
    async with gateway.http() as client:
        await client.get("/health")
        connections = gateway.server.server_state.connections
        flags = [
            connection.transport.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY
            )
            for connection in connections
        ]
    assert flags
    assert all(flags)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_time_to_first_token_is_not_the_end_of_the_answer(
    gateway: RunningGateway, fake: FakeDecode, stream: bool
) -> None:
    """Three tokens with a pause behind the first: it counts as time per token, not as TTFT."""
    gate = asyncio.Event()
    fake.script = lambda _: Script(gateway.ids("the one two"), gate=gate, gate_at=1)
    ttft, tpot = (m.labels(slo_class="default") for m in (metrics.TTFT, metrics.TPOT))
    before = ttft.sum, tpot.sum
    body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
    decode_client = gateway.gateway.decode_client
    with capture_logs() as lines:
        async with gateway.http() as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await poll_until(lambda: bool(fake.submitted))
            (choice,) = decode_client._streams[fake.info.instance_id]._sinks.values()
            await poll_until(lambda: choice.num_output_tokens == 1)
            begin = time.monotonic()
            await poll_until(lambda: time.monotonic() - begin > 0.2)
            gate.set()
            await asking
    (line,) = [line for line in lines if line["event"] == "request ended"]
    assert line["ttft_ms"] + 200 <= line["e2e_ms"]
    assert ttft.sum - before[0] == pytest.approx(line["ttft_ms"] / 1000, abs=1e-6)
    assert 0.1 <= tpot.sum - before[1] <= line["e2e_ms"] / 1000 / 2
