"""Mixed load that behaves badly: good requests, clients that leave at every stage, bad input.

Every request is accounted for: it ends well, was cut by us, or got a typed error. What is left is
``unexplained``, and so is whatever took longer than it may; a test wants none of it. What was
answered is kept, so that it can be compared with what an undisturbed engine says.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
# When a client leaves: within a moment of sending, at some time, with the first token, later.
STAGES = ("sending", "waiting", "first_token", "decoding")
_SENDING_S = 0.01


@dataclass(frozen=True, slots=True)
class StormShape:
    num_requests: int
    concurrency: int = 12
    share_cancelled: float = 0.4
    share_bad: float = 0.1
    num_prompts: int = 40
    longest_prompt: int = 200
    max_tokens: int = 24
    vocab: int = 1000
    longest_stay_s: float = 1.0  # of a client that leaves while it waits
    longest_s: float = 120.0  # of any request
    seed: int = 11


@dataclass(frozen=True, slots=True)
class Answered:
    """Token ids that a client was given, all of them or as far as it listened."""

    prompt: tuple[int, ...]
    is_sampled: bool
    token_ids: tuple[int, ...]

    def sampling(self, max_tokens: int) -> dict[str, Any]:
        """Of a request whose answer begins with these tokens."""
        return sampling_of(is_sampled=self.is_sampled) | {"max_tokens": max_tokens}


@dataclass(slots=True)
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)
    longest_s: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.outcomes.values())

    def count(self, outcome: str) -> None:
        self.outcomes[outcome.split(":", maxsplit=1)[0]] += 1
        if outcome.startswith("unexplained"):
            self.unexplained.append(outcome)

    def wrong(self, expected: Callable[[Answered], Sequence[int]]) -> list[Answered]:
        """Answers that are no beginning of what ``expected`` says."""
        return [
            answer
            for answer in self.answered
            if list(answer.token_ids) != list(expected(answer))[: len(answer.token_ids)]
        ]


def sampling_of(*, is_sampled: bool) -> dict[str, Any]:
    return {"temperature": 0.8, "seed": 3} if is_sampled else {"temperature": 0}


async def storm(
    url: str,
    model: str,
    shape: StormShape,
    at: dict[int, Callable[[], Awaitable[None]]] | None = None,
) -> Tally:
    """Sends the storm; ``at[i]`` runs when request i starts (a kill, say)."""
    limits = httpx.Limits(max_connections=2 * shape.concurrency)
    async with httpx.AsyncClient(
        base_url=url, timeout=2 * shape.longest_s, limits=limits, trust_env=False
    ) as client:
        return await _Storm(client, model, shape).run(at or {})


class _Storm:
    def __init__(self, client: httpx.AsyncClient, model: str, shape: StormShape) -> None:
        self._client = client
        self._model = model
        self._shape = shape
        self._chance = random.Random(shape.seed)
        self._tally = Tally()
        self._prompts = [self._make_prompt() for _ in range(shape.num_prompts)]

    def _make_prompt(self) -> tuple[int, ...]:
        length = self._chance.randint(1, self._shape.longest_prompt)
        return tuple(self._chance.randrange(5, self._shape.vocab) for _ in range(length))

    async def run(self, at: dict[int, Callable[[], Awaitable[None]]]) -> Tally:
        numbers = iter(range(self._shape.num_requests))

        async def worker() -> None:
            for number in numbers:
                if number in at:
                    await at[number]()
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._shape.concurrency):
                group.create_task(worker())
        return self._tally

    async def _one(self) -> None:
        began = time.monotonic()
        dice = self._chance.random()
        if dice < self._shape.share_bad:
            await self._bad()
        elif dice < self._shape.share_bad + self._shape.share_cancelled:
            await self._leave_early(self._chance.choice(STAGES))
        else:
            await self._finish()
        took_s = time.monotonic() - began
        self._tally.longest_s = max(self._tally.longest_s, took_s)
        if took_s > self._shape.longest_s:
            self._tally.unexplained.append(f"a request took {took_s:.1f} s")

    async def _bad(self) -> None:
        body = {"model": self._model} | self._chance.choice(BAD_BODIES)
        response = await self._client.post("/v1/completions", json=body)
        is_clear = 400 <= response.status_code < 500 and response.json()["error"]["message"]
        self._tally.outcomes["bad_input"] += 1
        if not is_clear:
            self._tally.unexplained.append(
                f"bad input got {response.status_code}: {response.text[:200]}"
            )

    def _call(self) -> _Call:
        prompt = self._chance.choice(self._prompts)
        is_sampled = self._chance.random() < 0.5
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": self._chance.randint(2, self._shape.max_tokens),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self._chance.random() < 0.8,
            **sampling_of(is_sampled=is_sampled),
        }
        return _Call(self._client, body, prompt, is_sampled)

    async def _finish(self) -> None:
        call = self._call()
        self._tally.count(await call.run())
        self._keep(call)

    async def _leave_early(self, stage: str) -> None:
        call = self._call()
        if stage in ("first_token", "decoding"):
            call.body["stream"] = True
            is_first = stage == "first_token"
            call.leave_after = 1 if is_first else self._chance.randint(2, call.body["max_tokens"])
        longest_s = {"sending": _SENDING_S, "waiting": self._shape.longest_stay_s}.get(stage)
        patience_s = None if longest_s is None else self._chance.uniform(0, longest_s)
        try:
            async with asyncio.timeout(patience_s):
                outcome = await call.run()
        except TimeoutError:
            outcome = "left"
        self._tally.count(f"cancelled_{stage}" if outcome == "left" else outcome)
        self._keep(call)

    def _keep(self, call: _Call) -> None:
        if call.token_ids:
            answered = Answered(call.prompt, call.is_sampled, tuple(call.token_ids))
            self._tally.answered.append(answered)


@dataclass(slots=True)
class _Call:
    """One request of which every token id is kept."""

    client: httpx.AsyncClient
    body: dict[str, Any]
    prompt: tuple[int, ...]
    is_sampled: bool
    leave_after: int | None = None  # tokens
    token_ids: list[int] = field(default_factory=list)

    async def run(self) -> str:
        """``good``, ``left``, ``typed_error:CODE`` or ``unexplained:WHY``."""
        try:
            if self.body["stream"]:
                return await self._read_stream()
            return self._outcome(await self.client.post("/v1/completions", json=self.body))
        except httpx.HTTPError as error:
            return f"unexplained: {error!r}"

    def _outcome(self, response: httpx.Response) -> str:
        content = response.json()
        if response.status_code == 200:
            self.token_ids += content["choices"][0]["token_ids"]
            return self._whole()
        if content.get("error", {}).get("code"):
            return f"typed_error:{content['error']['code']}"
        return f"unexplained: {response.status_code} {response.text[:200]}"

    def _whole(self) -> str:
        wanted = self.body["max_tokens"]
        if len(self.token_ids) == wanted:
            return "good"
        return f"unexplained: {len(self.token_ids)} of {wanted} tokens"

    async def _read_stream(self) -> str:
        error: str | None = None
        is_done = False
        async with self.client.stream("POST", "/v1/completions", json=self.body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._outcome(response)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    error = (event.get("error") or {}).get("code", error)
                    for choice in event.get("choices", ()):
                        self.token_ids += choice["token_ids"]
                if self.leave_after is not None and len(self.token_ids) >= self.leave_after:
                    return "left"
        if error:
            return f"typed_error:{error}"
        return self._whole() if is_done else "unexplained: the stream has no end"
