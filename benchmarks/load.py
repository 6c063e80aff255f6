"""A small closed-loop load client for any OpenAI-compatible /v1/completions endpoint.

Prompts are token ids, random and never repeated, so no prefix cache makes a prefill look free.
Times are the client's: TTFT = request sent → first content chunk, TPOT = (last − first chunk) /
(output tokens − 1), tokens/s over the span of the whole run. With a budget, requests that are still
running when it is spent are cancelled and count with what they have received by then.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import httpx

NO_TOKEN = "no token yet"


class TooSlow(RuntimeError):  # noqa: N818 - what was measured, not a mistake
    """The budget was spent before the first token of any request."""


@dataclass(frozen=True, slots=True)
class Sample:
    ttft_ms: float
    tpot_ms: float
    num_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the requests of one run."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    num_errors: int
    is_cut: bool = False


@dataclass(slots=True)
class Progress:
    """What one request has received so far; the times are of ``time.perf_counter``."""

    start: float = 0.0
    first: float = 0.0
    last: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""

    def sample(self) -> Sample:
        """Servers send a chunk a token; only an answer that has ended tells its exact number."""
        if self.error:
            return Sample(0, 0, 0, self.error)
        if not self.first:
            return Sample(0, 0, 0, NO_TOKEN)
        num_tokens = self.num_tokens or len(self.chunk_times)
        tpot_ms = (self.last - self.first) / max(1, num_tokens - 1) * 1e3
        return Sample((self.first - self.start) * 1e3, tpot_ms, num_tokens)


def random_prompt(num_tokens: int, vocab: int, source: random.Random) -> list[int]:
    return [source.randrange(100, vocab) for _ in range(num_tokens)]


async def follow(
    client: httpx.AsyncClient, url: str, model: str, prompt: list[int], max_tokens: int,
    progress: Progress,
) -> None:  # fmt: skip
    """Sends one streamed request and keeps ``progress`` up to date until its answer ends."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    progress.start = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            progress.error = f"{response.status_code}: {(await response.aread())[:200]!r}"
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                progress.error = str(event["error"])
                return
            if event.get("usage"):
                progress.num_tokens = event["usage"]["completion_tokens"]
            if event.get("choices"):
                progress.last = time.perf_counter()
                progress.first = progress.first or progress.last
                progress.chunk_times.append(progress.last)
    if not progress.first:
        progress.error = "empty answer"


async def run_load(
    url: str, model: str, *, concurrency: int, num_requests: int, prompt_tokens: int,
    max_tokens: int, vocab: int, seed: int, budget_s: float | None = None,
) -> Figures:  # fmt: skip
    """``num_requests`` requests, ``concurrency`` at a time, for ``budget_s`` seconds at most.

    Raises TooSlow when the budget was spent before any token, RuntimeError when every request
    failed, httpx.HTTPError when the server went away.
    """
    source = random.Random(seed)
    prompts = [random_prompt(prompt_tokens, vocab, source) for _ in range(num_requests)]
    started: list[Progress] = []
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(timeout=900, limits=limits, trust_env=False) as client:

        async def worker() -> None:
            while prompts:
                prompt, progress = prompts.pop(), Progress()
                started.append(progress)
                await follow(client, url, model, prompt, max_tokens, progress)

        start = time.perf_counter()
        workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
        is_cut = await end_within(workers, budget_s)
        seconds = time.perf_counter() - start
    samples = [progress.sample() for progress in started]
    good = [sample for sample in samples if not sample.error]
    if is_cut and all(sample.error == NO_TOKEN for sample in samples):
        raise TooSlow(f"no token within {budget_s:.0f} s")
    if not good:
        raise RuntimeError(f"every request failed: {samples[0].error}")
    return Figures(
        ttft_ms=statistics.median(sample.ttft_ms for sample in good),
        tpot_ms=statistics.median([s.tpot_ms for s in good if s.num_tokens > 1] or [0.0]),
        tokens_per_s=sum(sample.num_tokens for sample in good) / seconds,
        num_errors=sum(sample.error not in ("", NO_TOKEN) for sample in samples),
        is_cut=is_cut,
    )


async def end_within(tasks: list[asyncio.Task[None]], budget_s: float | None) -> bool:
    """Waits for the tasks; those that run longer are cancelled. Returns whether any was."""
    _, running = await asyncio.wait(tasks, timeout=budget_s)
    for task in running:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    return bool(running)
