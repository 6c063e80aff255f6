"""What a client sees of its class of service, and an operator of who met their targets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from isthmus.common import metrics
from isthmus.common.config import ClusterConfig, GatewayConfig
from isthmus.common.errors import InfeasibleSloError, SloShedError
from isthmus.common.slo import SloClassConfig, SloConfig, TenantConfig, hash_key
from isthmus.common.types import Slo
from isthmus.router import Held, RouteQuery, Verdict
from isthmus.router.verdict import Rejected
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import RunningGateway, running_gateway
from tests.support.poll import poll_until

HOUR_MS = 3_600_000.0
MESSAGES = [{"role": "user", "content": "hi"}]
CONFIG = ClusterConfig(
    slo=SloConfig(
        classes={
            "default": SloClassConfig(),
            "easy": SloClassConfig(ttft_ms=HOUR_MS, tpot_ms=HOUR_MS),
            "hopeless": SloClassConfig(ttft_ms=0.000_001, tpot_ms=0.000_001),
        }
    ),
    tenants={
        "acme": TenantConfig(api_keys=["sk-acme"], max_inflight=1, default_class="easy"),
        "lab": TenantConfig(key_hashes=[hash_key("sk-lab")]),
    },
    gateway=GatewayConfig(api_keys=["sk-old"]),
)


@pytest_asyncio.fixture
async def fake() -> FakeDecode:
    return FakeDecode()


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, fake: FakeDecode) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path, [fake], CONFIG) as running:
        fake.script = lambda _: Script(running.ids("the one two"))
        yield running


def counted(slo_class: str, outcome: str, tenant: str = "lab") -> float:
    labels = {"slo_class": slo_class, "tenant": tenant, "outcome": outcome}
    return metrics.REQUESTS.labels(**labels)._value.get()


def refused_for(reason: str, tenant: str, slo_class: str = "easy") -> float:
    labels = {"slo_class": slo_class, "tenant": tenant, "decision": "reject", "reason": reason}
    return metrics.ADMISSION.labels(**labels)._value.get()


def offered(slo_class: str, tenant: str = "lab") -> float:
    return metrics.REQUESTS_OFFERED.labels(slo_class=slo_class, tenant=tenant)._value.get()


async def ask(
    gateway: RunningGateway, key: str = "sk-lab", headers: Any = None, **fields: Any
) -> httpx.Response:
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    sent = {"authorization": f"Bearer {key}", **(headers or {})}
    async with gateway.http() as client:
        return await client.post("/v1/chat/completions", json=body, headers=sent)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_is_told_what_was_promised_and_kept(
    gateway: RunningGateway, stream: bool
) -> None:
    """Beside all that it knows: it keeps the fields that it does not."""
    async with gateway.openai("sk-lab") as client:
        common: dict[str, Any] = {
            "model": "tiny",
            "messages": MESSAGES,
            "extra_body": {"slo": {"class": "easy", "e2e_ms": HOUR_MS}},
        }
        if stream:
            options = {"include_usage": True}
            chunks = await client.chat.completions.create(
                **common, stream=True, stream_options=options
            )
            usage = [chunk async for chunk in chunks][-1].usage
        else:
            usage = (await client.chat.completions.create(**common)).usage
    assert usage is not None
    report = usage.model_dump()["isthmus"]
    assert report["slo_class"] == "easy"
    assert report["target_ttft_ms"] == report["target_tpot_ms"] == HOUR_MS
    assert min(report["predicted_ttft_ms"], report["predicted_tpot_ms"]) > 0
    assert 0 < report["ttft_ms"] <= report["e2e_ms"]
    assert report["tpot_ms"] >= 0
    assert report["admission"] == "admit"
    assert report["cached_tokens"] == 0
    assert (report["kv_exposed_ms"], report["second_token_gap_ms"]) == (3.0, 5.0)
    assert report["good"] is True


@pytest.mark.asyncio
async def test_headers_say_the_class_the_prediction_and_the_place(gateway: RunningGateway) -> None:
    answer = await ask(gateway, headers={"x-isthmus-slo-class": "easy", "x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-isthmus-request-id"].startswith("mine.")
    assert answer.headers["x-isthmus-slo-class"] == "easy"
    assert float(answer.headers["x-isthmus-predicted-ttft-ms"]) > 0
    assert float(answer.headers["x-isthmus-predicted-tpot-ms"]) > 0
    assert float(answer.headers["x-isthmus-target-ttft-ms"]) == HOUR_MS
    assert float(answer.headers["x-isthmus-target-tpot-ms"]) == HOUR_MS
    assert "x-isthmus-target-e2e-ms" not in answer.headers
    assert answer.headers["x-isthmus-decode"] == "decode-0"
    assert answer.headers["x-isthmus-policy"] == gateway.router.snapshot().policy


@pytest.mark.asyncio
async def test_targets_travel_to_the_router_and_to_the_instance(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    answer = await ask(gateway, slo={"class": "easy", "ttft_ms": 5_000})
    (record,) = gateway.router.log.of_request(answer.headers["x-isthmus-request-id"])
    assert record.slo == Slo("easy", 5_000, HOUR_MS)
    assert record.tenant == "lab"
    (request,) = fake.requests
    assert (request.slo.class_name, request.slo.ttft_ms, request.tenant) == ("easy", 5_000, "lab")


@pytest.mark.asyncio
async def test_a_conversation_is_named_by_header_or_body(gateway: RunningGateway) -> None:
    sessions = gateway.router.sessions
    await ask(gateway)
    assert len(sessions) == 0
    await ask(gateway, headers={"x-isthmus-session": "one"})
    await ask(gateway, prompt_cache_key="one")
    assert len(sessions) == 1
    await ask(gateway, key="sk-acme", prompt_cache_key="one")
    assert len(sessions) == 2
    long = "x" * 257
    for answer in (
        await ask(gateway, headers={"x-isthmus-session": long}),
        await ask(gateway, prompt_cache_key=long),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in ("x-isthmus-session", "prompt_cache_key")
    assert len(sessions) == 2


@pytest.mark.asyncio
async def test_outcomes_are_counted_by_class_and_tenant(gateway: RunningGateway) -> None:
    before = {name: counted(*name) for name in (("easy", "good"), ("hopeless", "both"))}
    before_offered = offered("easy"), offered("hopeless")
    await ask(gateway, slo={"class": "easy"})
    late = await ask(gateway, slo={"class": "hopeless"})
    assert late.json()["usage"]["isthmus"]["good"] is False
    assert {name: counted(*name) - count for name, count in before.items()} == {
        ("easy", "good"): 1,
        ("hopeless", "both"): 1,
    }
    assert (offered("easy"), offered("hopeless")) == tuple(n + 1 for n in before_offered)
    ratios = gateway.gateway.goodput.ratios()
    assert ratios == {("easy", "lab"): 1.0, ("hopeless", "lab"): 0.0}


@pytest.mark.asyncio
async def test_a_wrong_class_is_told_and_is_no_demand(gateway: RunningGateway) -> None:
    before = offered("default"), counted("default", "invalid")
    answer = await ask(gateway, slo={"class": "gold"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["reason"]) == (
        400,
        "slo.class",
        "invalid_request",
    )
    assert "default, easy, hopeless" in error["message"]
    assert answer.headers["x-isthmus-request-id"]
    assert (offered("default"), counted("default", "invalid")) == (before[0], before[1] + 1)


@pytest.mark.asyncio
async def test_a_tenant_has_its_class_and_its_share_of_places(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    gate = asyncio.Event()
    fake.script = lambda _: Script(gateway.ids("the one"), gate=gate, gate_at=1)
    first = asyncio.create_task(ask(gateway, "sk-acme"))
    await poll_until(lambda: len(fake.submitted) == 1)
    before = counted("easy", "rejected", "acme"), offered("easy", "acme")
    before_refused = refused_for("quota_exceeded", "acme"), refused_for("quota_exceeded", "lab")
    refused = await ask(gateway, "sk-acme")
    others = asyncio.create_task(ask(gateway, "sk-lab"))
    await poll_until(lambda: len(fake.submitted) == 2)
    gate.set()
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["stage"]) == (
        429,
        "quota_exceeded",
        "admission",
    )
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert counted("easy", "rejected", "acme") == before[0] + 1
    assert offered("easy", "acme") == before[1] + 1
    after_refused = refused_for("quota_exceeded", "acme"), refused_for("quota_exceeded", "lab")
    assert after_refused == (before_refused[0] + 1, before_refused[1])
    assert (await first).headers["x-isthmus-slo-class"] == "easy"
    assert (await others).status_code == 200
    assert (await ask(gateway, "sk-acme")).status_code == 200


@pytest.mark.asyncio
async def test_keys_of_either_kind_open_the_door_and_no_other_does(
    gateway: RunningGateway, fake: FakeDecode
) -> None:
    for key in ("sk-old", "sk-lab"):
        assert (await ask(gateway, key)).status_code == 200
    assert (await ask(gateway, hash_key("sk-lab"))).status_code == 401
    salts = [request.cache_salt for request in fake.requests]
    assert len(set(salts)) == 2
    assert all(salts)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SloShedError("too much", stage="route", retry_after_ms=9_000), 429),
        (InfeasibleSloError("too long", stage="route"), 422),
    ],
)
async def test_a_refusal_says_what_it_compared(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, error: Any, status: int
) -> None:
    error.predicted_ms, error.limit_ms = 812.5, 500.0

    def submit(_: RouteQuery) -> Verdict:
        return Rejected(error)

    monkeypatch.setattr(gateway.router, "submit", submit)
    before = counted("easy", "rejected")
    answer = await ask(gateway, slo={"class": "easy"})
    told = answer.json()["error"]
    assert answer.status_code == status
    assert answer.headers["x-isthmus-slo-class"] == "easy"
    assert float(answer.headers["x-isthmus-target-ttft-ms"]) == HOUR_MS
    assert answer.headers["x-isthmus-admission"] == "reject"
    assert (told["code"], told["predicted_ms"], told["limit_ms"]) == (error.code, 812.5, 500.0)
    assert answer.headers.get("retry-after") == ("9" if status == 429 else None)
    assert counted("easy", "rejected") == before + 1


@pytest.mark.asyncio
async def test_one_that_waits_in_the_router_leaves_with_its_client(
    gateway: RunningGateway, fake: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []
    cancelled: list[str] = []

    def submit(query: RouteQuery) -> Verdict:
        held.append(query.request_id)
        return Held(query.request_id, None)

    monkeypatch.setattr(gateway.router, "submit", submit)
    monkeypatch.setattr(gateway.router, "cancel", cancelled.append)
    before = metrics.CANCELS.labels(stage="route")._value.get()
    asking = asyncio.create_task(ask(gateway))
    await poll_until(lambda: len(held) == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await poll_until(lambda: cancelled == held)
    await poll_until(lambda: metrics.CANCELS.labels(stage="route")._value.get() == before + 1)
    assert not fake.submitted
