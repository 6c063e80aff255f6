"""Requests that wait in the router for their turn: they go when a place is free, or leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from isthmus.common.config import ClusterConfig, GatewayConfig, RouterConfig
from isthmus.common.ids import DecisionId
from isthmus.router import Outcome, OutcomeKind
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, running_gateway
from tests.support.poll import poll_until

NUM_REQUESTS = 6
PROMPT = "the one two " * 40
CONFIG = ClusterConfig(
    router=RouterConfig(policy="goodput", reservation_ttl_ms=60_000),
    gateway=GatewayConfig(request_timeout_ms=50_000),
)


@pytest_asyncio.fixture
async def fake() -> FakeDecode:
    return FakeDecode()


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, fake: FakeDecode) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, [fake], CONFIG) as running:
        yield running


def ask_many(
    gateway: RunningGateway, client: httpx.AsyncClient
) -> list[asyncio.Task[httpx.Response]]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
    return [
        asyncio.create_task(
            client.post("/v1/completions", json={**body, "prompt": PROMPT + str(n)})
        )
        for n in range(NUM_REQUESTS)
    ]


@pytest.mark.asyncio
async def test_who_has_to_wait_goes_when_another_has_its_first_token(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    gate = asyncio.Event()
    fake.script = lambda _: Script(gateway.ids("the one"), gate=gate, gate_at=0)
    async with gateway.http() as client:
        client.timeout = httpx.Timeout(60)
        asking = ask_many(gateway, client)
        await poll_until(lambda: gateway.router.num_held + len(fake.submitted) == NUM_REQUESTS, 20)
        assert gateway.router.num_held > 0
        assert gateway.router.snapshot().num_reservations == len(fake.submitted)
        gate.set()
        answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS
    assert gateway.router.num_held == 0


@pytest.mark.asyncio
async def test_clients_that_leave_while_they_wait_leave_nothing_in_the_router(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    gate = asyncio.Event()
    fake.script = lambda _: Script(gateway.ids("the one"), gate=gate, gate_at=0)
    async with gateway.http() as client:
        client.timeout = httpx.Timeout(60)
        asking = ask_many(gateway, client)
        await poll_until(lambda: gateway.router.num_held + len(fake.submitted) == NUM_REQUESTS, 20)
        assert gateway.router.num_held > 0
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await poll_until(lambda: gateway.router.num_held == 0, 20)
    gate.set()


@pytest.mark.asyncio
async def test_the_router_learns_how_long_answers_are(
    gateway: RunningGateway, fake: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script = lambda _: Script(gateway.ids("the one two"))
    told: list[int] = []
    report = gateway.router.report

    def listen(decision_id: DecisionId, outcome: Outcome) -> None:
        if outcome.kind is OutcomeKind.FINISHED:
            told.append(outcome.num_output_tokens)
        report(decision_id, outcome)

    monkeypatch.setattr(gateway.router, "report", listen)
    async with gateway.http() as client:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}
        answer = await client.post("/v1/completions", json=body)
    assert told == [answer.json()["usage"]["completion_tokens"]] == [3]
