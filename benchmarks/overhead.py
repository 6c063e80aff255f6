"""What router and gateway add to TTFT: HTTP through the gateway beside the same call without it.

``python -m benchmarks.overhead`` sends streamed requests to a gateway process and gRPC calls to the
decode instance behind it, in turns, over connections that stay open, with fresh prompts. The decode
instance answers at once, so that the figures hold nothing else; ``added`` is the difference of the
two requests of one pair. ``cpu`` is what the gateway process computes for one request, less what it
does at rest. A busy machine changes its low percentiles least: compare versions by ``cpu_p5_ms``.

With ``--end-to-end`` the pairs go to a cluster with a real model, whose prefill scatters by more
than the gateway adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvloop

from benchmarks.cluster import CLUSTER_NAME, MODEL_NAME, OUT, Running, free_port, serve, wait_for
from benchmarks.load import random_prompt
from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.config import ClusterConfig, GatewayConfig, ModelConfig
from isthmus.common.model_files import locate_model
from isthmus.common.rpc import create_channel
from isthmus.gateway.main import CONFIG_VARIABLE
from isthmus.gateway.tokenizer import TextTokenizer, load_tokenizer
from isthmus.protos.convert.instances import info_from_pb
from isthmus.protos.v1 import instance_pb2, instance_pb2_grpc
from tests.support.gateway_stub import GatewayStub, make_request

WARM_UP = 10
REST_S = 3.0
FORMS = ("ids", "text", "chat")


class KeepAliveClient:
    """One open connection: the least that a client can cost, so that the gateway is measured."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").partition(":")

    async def __aenter__(self) -> KeepAliveClient:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def ttft_ms(self, path: str, body: dict[str, Any]) -> float:
        """Request sent → first event received. Raises RuntimeError for any answer but 200."""
        content = orjson.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        start = time.perf_counter()
        self._writer.write(head.encode() + content)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError((answer + await self._reader.read(1000)).decode(errors="replace"))
        await self._reader.readuntil(b"data: {")
        first = time.perf_counter()
        await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return (first - start) * 1e3


@dataclass(slots=True)
class Prompts:
    """Prompts of ``num_tokens`` that nobody has seen."""

    tokenizer: TextTokenizer
    num_tokens: int
    source: random.Random

    def ids(self) -> list[int]:
        return random_prompt(self.num_tokens, self.tokenizer.vocab_size, self.source)

    def text(self) -> str:
        """Of whole words, about one a token."""
        table, words = self.tokenizer.token_bytes, list[bytes]()
        while len(words) < self.num_tokens:
            token = self.source.choice(table)
            if len(token) > 3 and token.startswith(b" ") and token[1:].isalpha():
                words.append(token)
        return b"".join(words).decode()

    def request(self, form: str) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        body: dict[str, Any] = {
            "model": MODEL_NAME, "max_tokens": 2, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        if form == "chat":
            messages = [{"role": "user", "content": self.text()}]
            return "/v1/chat/completions", {**body, "messages": messages}
        return "/v1/completions", {**body, "prompt": self.ids() if form == "ids" else self.text()}


async def ttft_direct(stub: GatewayStub, prefill: InstanceInfo | None, prompt: list[int]) -> float:
    start = time.perf_counter()
    answer = await stub.submit(make_request(prompt, max_tokens=2), prefill)
    await answer.has_token.wait()
    first = time.perf_counter()
    await answer.end()
    return (first - start) * 1e3


class CpuMeter:
    """CPU time of all threads of a process, less what it uses at rest. Linux."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self.rest = 0.0  # cores
        self._start_ns, self._start_s = self._total_ns(), time.perf_counter()

    async def measure_rest(self, seconds: float) -> None:
        self._start_ns, self._start_s = self._total_ns(), time.perf_counter()
        await asyncio.sleep(seconds)
        self.rest = self.used_ms() / 1e3 / (time.perf_counter() - self._start_s)

    def used_ms(self) -> float:
        """Since ``measure_rest`` began."""
        at_rest_s = self.rest * (time.perf_counter() - self._start_s)
        return (self._total_ns() - self._start_ns) / 1e6 - 1e3 * at_rest_s

    def _total_ns(self) -> int:
        return sum(int(file.read_text().split()[0]) for file in self._tasks.glob("*/schedstat"))


async def measure_pairs(
    count: int,
    through: Callable[[], Awaitable[float]],
    beside: Callable[[], Awaitable[float]],
    meter: CpuMeter | None = None,
) -> dict[str, float]:
    """Milliseconds; the first pairs warm both ways up and do not count."""
    pairs, used_ms = list[tuple[float, float]](), list[float]()
    for _ in range(WARM_UP + count):
        used_ms.append(meter.used_ms() if meter else 0.0)
        pairs.append((await through(), await beside()))
    used_ms.append(meter.used_ms() if meter else 0.0)
    pairs = pairs[WARM_UP:]
    figures = {}
    for name, values in (
        ("through", [a for a, _ in pairs]),
        ("without", [b for _, b in pairs]),
        ("added", [a - b for a, b in pairs]),
    ):
        figures[f"{name}_p50_ms"] = percentile(values, 0.5)
        figures[f"{name}_p99_ms"] = percentile(values, 0.99)
    if meter:
        of_each = [b - a for a, b in pairwise(used_ms[WARM_UP:])]
        figures |= {f"cpu_p{p}_ms": percentile(of_each, p / 100) for p in (5, 50)}
    return figures


def percentile(values: list[float], share: float) -> float:
    return round(sorted(values)[int(share * len(values))], 3)


# --- a gateway with nothing behind it ----------------------------------------------------------
@contextmanager
def serve_instant(token_ids: list[int]) -> Iterator[tuple[str, int, str]]:
    """URL and pid of a gateway, and the address of the decode instance behind it."""
    port = free_port()
    config = ClusterConfig(
        name=CLUSTER_NAME, gateway=GatewayConfig(port=port), model=ModelConfig(path="sample")
    )
    behind = subprocess.Popen(
        [
            sys.executable, "-m", "benchmarks.instant_decode", "--cluster", CLUSTER_NAME,
            "--model", MODEL_NAME, "--token-ids", *map(str, token_ids),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert behind.stdin is not None
    assert behind.stdout is not None
    gateway = None
    try:
        addresses = json.loads(behind.stdout.readline())
        gateway = subprocess.Popen(
            [sys.executable, "-m", "isthmus.gateway.main", "--registry", addresses["registry"]],
            env=os.environ | {CONFIG_VARIABLE: config.model_dump_json()},
            stderr=subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/ready", gateway, 60)
        yield url, gateway.pid, addresses["decode"]
    finally:
        if gateway is not None:
            gateway.terminate()
            gateway.wait(20)
        behind.stdin.close()
        behind.wait(20)


async def measure_instant(sizes: list[int], count: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(locate_model("sample"))
    token_ids = tokenizer.encode(" hello world", add_special_tokens=False)
    with serve_instant(token_ids) as (url, pid, address):
        async with create_channel(address) as channel:
            stub = instance_pb2_grpc.InstanceServiceStub(channel)
            decode = info_from_pb((await stub.GetInfo(instance_pb2.GetInfoRequest())).info)
        meter = CpuMeter(pid)
        await meter.measure_rest(REST_S)
        result: dict[str, Any] = {"gateway_cores_at_rest": round(meter.rest, 4)}
        async with AsyncExitStack() as stack:
            direct = await stack.enter_async_context(GatewayStub(decode))
            http = await stack.enter_async_context(KeepAliveClient(url))
            for size in sizes:
                prompts = Prompts(tokenizer, size, random.Random(size))
                for form in FORMS:
                    result[f"{size} tokens, {form}"] = await measure_pairs(
                        count,
                        lambda form=form, p=prompts: http.ttft_ms(*p.request(form)),
                        lambda p=prompts: ttft_direct(direct, None, p.ids()),
                        meter,
                    )
    return result


# --- a cluster ---------------------------------------------------------------------------------
async def measure_cluster(running: Running, sizes: list[int], count: int) -> dict[str, Any]:
    infos = {item.role: item.info for item in await running.fetch_instances()}
    decode, prefill = infos[Role.DECODE], infos[Role.PREFILL]
    assert decode is not None
    tokenizer = load_tokenizer(locate_model("sample"))
    result: dict[str, Any] = {}
    async with GatewayStub(decode) as direct, KeepAliveClient(running.url) as http:
        for size in sizes:
            prompts = Prompts(tokenizer, size, random.Random(size))
            result[f"{size} tokens, ids"] = await measure_pairs(
                count,
                lambda p=prompts: http.ttft_ms(*p.request("ids")),
                lambda p=prompts: ttft_direct(direct, prefill, p.ids()),
            )
    return result | gateway_stages(running.url)


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
    parser.add_argument("--end-to-end", action="store_true", help="with a model behind it")
    parser.add_argument("--pairs", type=int, default=300, help="of each kind of request")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[48, 512])
    args = parser.parse_args()
    if args.end_to_end:
        with serve("sample", "--dtype", "bfloat16", "--actuator", "process") as running:
            result = uvloop.run(measure_cluster(running, args.prompt_tokens, args.pairs))
    else:
        result = uvloop.run(measure_instant(args.prompt_tokens, args.pairs))
    OUT.mkdir(exist_ok=True)
    (OUT / "overhead.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
