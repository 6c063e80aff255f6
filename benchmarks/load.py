"""A small closed-loop load client for any OpenAI-compatible /v1/completions endpoint.

Prompts are token ids, random and never repeated, so no prefix cache makes a prefill look free.
Times are the client's: TTFT = request sent → first content chunk, TPOT = (last − first chunk) /
(output tokens − 1), tokens/s over the span of the whole run.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass

import httpx


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


def random_prompt(num_tokens: int, vocab: int, source: random.Random) -> list[int]:
    return [source.randrange(100, vocab) for _ in range(num_tokens)]


async def complete(
    client: httpx.AsyncClient, url: str, model: str, prompt: list[int], max_tokens: int
) -> Sample:
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start = time.perf_counter()
    first = last = 0.0
    num_tokens = 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            return Sample(0, 0, 0, f"{response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                return Sample(0, 0, 0, str(event["error"]))
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            if event.get("choices"):
                last = time.perf_counter()
                first = first or last
    if not first or num_tokens < 1:
        return Sample(0, 0, 0, "empty answer")
    tpot = (last - first) / max(1, num_tokens - 1) * 1e3
    return Sample((first - start) * 1e3, tpot, num_tokens)


async def run_load(
    url: str, model: str, *, concurrency: int, num_requests: int, prompt_tokens: int,
    max_tokens: int, vocab: int, seed: int,
) -> Figures:  # fmt: skip
    """``num_requests`` requests, ``concurrency`` at a time."""
    source = random.Random(seed)
    prompts = [random_prompt(prompt_tokens, vocab, source) for _ in range(num_requests)]
    samples: list[Sample] = []
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(timeout=900, limits=limits, trust_env=False) as client:

        async def worker() -> None:
            while prompts:
                samples.append(await complete(client, url, model, prompts.pop(), max_tokens))

        start = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        seconds = time.perf_counter() - start
    good = [sample for sample in samples if not sample.error]
    if not good:
        raise RuntimeError(f"every request failed: {samples[0].error}")
    return Figures(
        ttft_ms=statistics.median(sample.ttft_ms for sample in good),
        tpot_ms=statistics.median(sample.tpot_ms for sample in good),
        tokens_per_s=sum(sample.num_tokens for sample in good) / seconds,
        num_errors=len(samples) - len(good),
    )
