"""Mixed load that behaves badly: good requests, clients that leave at any moment, bad input.

Every request is accounted for: it ends well, was cut by us, or got a typed error. What is left is
``unexplained``, and a test wants none of it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

BAD_BODIES: tuple[dict[str, object], ...] = (
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "temperature": -2},
    {"prompt": "x", "no_such_parameter": 1},
    {"prompt": [], "max_tokens": 4},
    {"prompt": [10**7], "max_tokens": 4},
    {"prompt": "x", "max_tokens": 10**7},
    {"prompt": "x", "model": "no-such-model"},
    {"prompt": "x", "tools": [{"type": "function"}]},
    {"prompt": list(range(200)) * 200, "max_tokens": 4},
)


@dataclass(frozen=True, slots=True)
class StormShape:
    num_requests: int
    concurrency: int = 12
    share_cancelled: float = 0.3
    share_bad: float = 0.1
    longest_prompt: int = 200
    max_tokens: int = 24
    vocab: int = 1000
    longest_stay_s: float = 1.0  # a client that leaves does so within this time
    seed: int = 11


@dataclass(slots=True)
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.outcomes.values())


async def storm(
    url: str,
    model: str,
    shape: StormShape,
    at: dict[int, Callable[[], Awaitable[None]]] | None = None,
) -> Tally:
    """Sends the storm; ``at[i]`` runs when request i starts (a kill, say)."""
    source = random.Random(shape.seed)
    tally = Tally()
    numbers = iter(range(shape.num_requests))
    limits = httpx.Limits(max_connections=2 * shape.concurrency)
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=limits, trust_env=False
    ) as client:

        async def worker() -> None:
            for number in numbers:
                if at and number in at:
                    await at[number]()
                await _one(client, model, shape, source, tally)

        async with asyncio.TaskGroup() as group:
            for _ in range(shape.concurrency):
                group.create_task(worker())
    return tally


async def _one(
    client: httpx.AsyncClient, model: str, shape: StormShape, source: random.Random, tally: Tally
) -> None:
    dice = source.random()
    if dice < shape.share_bad:
        await _bad(client, model, source, tally)
        return
    length = source.randint(1, shape.longest_prompt)
    body = {
        "model": model,
        "prompt": [source.randrange(5, shape.vocab) for _ in range(length)],
        "max_tokens": source.randint(1, shape.max_tokens),
        "temperature": source.choice((0, 0.8)),
        "ignore_eos": True,
        "stream": source.random() < 0.8,
    }
    if dice < shape.share_bad + shape.share_cancelled:
        await _leave_early(client, body, source.uniform(0, shape.longest_stay_s), tally)
    else:
        await _finish(client, body, tally)


async def _bad(client: httpx.AsyncClient, model: str, source: random.Random, tally: Tally) -> None:
    body = {"model": model} | source.choice(BAD_BODIES)
    response = await client.post("/v1/completions", json=body)
    is_clear = 400 <= response.status_code < 500 and response.json()["error"]["message"]
    tally.outcomes["bad_input"] += 1
    if not is_clear:
        tally.unexplained.append(f"bad input got {response.status_code}: {response.text[:200]}")


async def _leave_early(
    client: httpx.AsyncClient, body: dict[str, object], stay_s: float, tally: Tally
) -> None:
    try:
        async with asyncio.timeout(stay_s):
            await _finish(client, body, Tally())
    except TimeoutError:
        tally.outcomes["cancelled"] += 1
    else:
        tally.outcomes["finished_before_cancel"] += 1


async def _finish(client: httpx.AsyncClient, body: dict[str, object], tally: Tally) -> None:
    try:
        if body["stream"]:
            outcome = await _read_stream(client, body)
        else:
            outcome = _outcome(await client.post("/v1/completions", json=body), body)
    except httpx.HTTPError as error:
        outcome = f"unexplained: {error!r}"
    tally.outcomes[outcome.split(":")[0]] += 1
    if outcome.startswith("unexplained"):
        tally.unexplained.append(outcome)


def _outcome(response: httpx.Response, body: dict[str, object]) -> str:
    content = response.json()
    if response.status_code == 200:
        num_tokens = content["usage"]["completion_tokens"]
        return "good" if num_tokens == body["max_tokens"] else f"unexplained: {num_tokens} tokens"
    if content.get("error", {}).get("code"):
        return f"typed_error:{content['error']['code']}"
    return f"unexplained: {response.status_code} {response.text[:200]}"


async def _read_stream(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    error: str | None = None
    finish_reason = None
    is_done = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return _outcome(response, body)
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if event.get("error"):
                    error = event["error"].get("code")
                for choice in event.get("choices", ()):
                    finish_reason = choice.get("finish_reason") or finish_reason
    if error:
        return f"typed_error:{error}"
    if is_done and finish_reason == "length":
        return "good"
    return f"unexplained: stream ended with {finish_reason=} {is_done=}"
