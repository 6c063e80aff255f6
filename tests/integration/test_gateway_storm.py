"""Many requests of all kinds over instances that die and come back: all end, nothing stays."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from isthmus.common import metrics
from isthmus.common.errors import OutOfBlocksError, TransferTimeoutError
from isthmus.protos.v1 import common_pb2
from tests.support.fake_decode import FakeDecode, Script
from tests.support.gateway_server import running_gateway
from tests.support.poll import poll_until

NUM_REQUESTS = 300
TEXT = "the one two three 안 zeta eta"
STATUSES = {200, 400, 502, 503, 504}


def outcomes() -> float:
    """Requests counted so far, whatever became of them."""
    samples = [sample for family in metrics.REQUESTS.collect() for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


@pytest.mark.asyncio
async def test_every_request_ends_and_is_counted_once(tmp_path: Path) -> None:
    rng = random.Random(11)
    fakes = [FakeDecode(f"decode-{number}") for number in range(3)]
    before = outcomes()
    async with running_gateway(tmp_path, fakes) as gateway:
        ids = (*gateway.ids(TEXT), 2)

        def script(_: common_pb2.Request) -> Script:
            kind = rng.random()
            if kind < 0.05:
                return Script(ids, error=OutOfBlocksError("full"))
            if kind < 0.1:
                return Script(ids, error=TransferTimeoutError("late"), error_at=rng.randrange(6))
            return Script(ids, tokens_per_step=rng.randint(1, 4))

        for fake in fakes:
            fake.script = script
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=gateway.url, limits=unlimited, timeout=30) as client:
            storm = [asyncio.create_task(one_request(client, rng)) for _ in range(NUM_REQUESTS)]
            for number, fake in enumerate(fakes[:2], start=1):
                await poll_until(lambda n=number: sum(t.done() for t in storm) > 50 * n, 30)
                await fake.kill()
                await fake.start()
            results = await asyncio.gather(*storm, return_exceptions=True)
        answers = [result for result in results if isinstance(result, httpx.Response)]
        left = [result for result in results if isinstance(result, asyncio.CancelledError)]
        assert len(answers) + len(left) == NUM_REQUESTS
        assert {answer.status_code for answer in answers} <= STATUSES
        for answer in answers:
            check_whole(answer)
        assert sum(answer.status_code == 200 for answer in answers) > NUM_REQUESTS / 3
        await poll_until(lambda: gateway.gateway.limiter.num_inflight == 0)
        assert NUM_REQUESTS - len(left) <= outcomes() - before <= NUM_REQUESTS


async def one_request(client: httpx.AsyncClient, rng: random.Random) -> httpx.Response:
    body: dict[str, object] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi " * rng.randint(1, 20)}],
        "stream": rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 2)),
    }
    if rng.random() < 0.1:
        body["bogus"] = 1
    delay_s, gives_up = rng.random() / 2, rng.random() < 0.3
    patience_s = rng.random() / 5
    await asyncio.sleep(delay_s)
    asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
    if gives_up:
        await asyncio.wait([asking], timeout=patience_s)
        asking.cancel()
    return await asking


def check_whole(answer: httpx.Response) -> None:
    """A 200 has the whole text, or says what went wrong."""
    if answer.status_code != 200:
        assert answer.json()["error"]["code"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in answer.text or '"error"' in answer.text
    else:
        texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert texts == [TEXT] * len(texts)
