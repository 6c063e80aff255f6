"""What router and gateway add to TTFT: HTTP through the gateway beside the same call without it.

``python -m benchmarks.overhead`` alternates streamed requests to the gateway with gRPC calls to the
decode instance that name the same prefill instance, prompts fresh each time, on an idle cluster.
Printed are the medians, their difference, and the gateway's own stages from its metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

import httpx

from benchmarks.cluster import MODEL_NAME, OUT, Running, serve
from benchmarks.load import random_prompt
from isthmus.common.cluster import InstanceInfo, Role
from tests.support.gateway_stub import GatewayStub, make_request

VOCAB = 49_000


async def ttft_by_http(client: httpx.AsyncClient, prompt: list[int]) -> float:
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    start = time.perf_counter()
    first = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter()
    return (first - start) * 1e3


async def ttft_direct(stub: GatewayStub, prefill: InstanceInfo, prompt: list[int]) -> float:
    start = time.perf_counter()
    answer = await stub.submit(make_request(prompt, max_tokens=2), prefill)
    await answer.has_token.wait()
    first = time.perf_counter()
    await answer.end()
    return (first - start) * 1e3


async def measure(running: Running, count: int, prompt_tokens: int) -> dict[str, float]:
    infos = {item.role: item.info for item in await running.fetch_instances()}
    decode, prefill = infos[Role.DECODE], infos[Role.PREFILL]
    assert decode is not None
    assert prefill is not None
    source = random.Random(3)
    http: list[float] = []
    direct: list[float] = []
    async with (
        GatewayStub(decode) as stub,
        httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client,
    ):
        for number in range(count + 5):
            through = await ttft_by_http(client, random_prompt(prompt_tokens, VOCAB, source))
            beside = await ttft_direct(stub, prefill, random_prompt(prompt_tokens, VOCAB, source))
            if number >= 5:  # the first ones warm both ways up
                http.append(through)
                direct.append(beside)
    return {
        "requests": count,
        "ttft_ms_through_gateway": statistics.median(http),
        "ttft_ms_without": statistics.median(direct),
        "added_ms_p50": statistics.median(http) - statistics.median(direct),
        "added_ms_p50_of_pairs": statistics.median(
            a - b for a, b in zip(http, direct, strict=True)
        ),
    }


def gateway_stages(url: str) -> dict[str, float]:
    """Mean milliseconds of the gateway's own stages, from /metrics."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text.splitlines():
        for target, name in ((sums, "sum"), (counts, "count")):
            head = f"isthmus_stage_seconds_{name}{{"
            if line.startswith(head):
                stage = line.split('stage="')[1].split('"')[0]
                target[stage] = float(line.rsplit(" ", 1)[1])
    return {f"mean_{s}_ms": round(1e3 * sums[s] / counts[s], 3) for s in sums if counts.get(s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    args = parser.parse_args()
    with serve("sample", "--dtype", "bfloat16") as running:
        result = asyncio.run(measure(running, args.requests, args.prompt_tokens))
        result |= gateway_stages(running.url)
    OUT.mkdir(exist_ok=True)
    (OUT / "overhead.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
