"""What the gateway's mock decode instance takes by itself: one gRPC request at a time, or
``--rate`` a second at random times.

``python -m benchmarks.frontends.direct --address HOST:PORT`` prints the times of ``load`` as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import uvloop

from benchmarks.frontends.load import SILENCE_S, Times, percentile
from isthmus.common.rpc import create_channel
from isthmus.protos.convert.instances import info_from_pb
from isthmus.protos.v1 import instance_pb2, instance_pb2_grpc
from tests.support.gateway_stub import GatewayStub, make_request

NUM_PROMPT_TOKENS = 80
WARM_S = 0.5


async def measure(address: str, num_tokens: int, seconds: float, rate: float) -> dict[str, float]:
    async with create_channel(address) as channel:
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        info = info_from_pb(
            (await stub.GetInfo(instance_pb2.GetInfoRequest(), timeout=SILENCE_S)).info
        )
    times, prompt = Times(), list(range(100, 100 + NUM_PROMPT_TOKENS))
    deadline_s = WARM_S + seconds + SILENCE_S
    async with asyncio.timeout(deadline_s), GatewayStub(info) as direct:
        begins = time.perf_counter() + WARM_S
        ends = begins + seconds

        async def ask() -> None:
            start = time.perf_counter()
            answer = await direct.submit(make_request(prompt, max_tokens=num_tokens), None)
            await answer.has_token.wait()
            first = time.perf_counter()
            await answer.end()
            if start >= begins:
                times.ttft.append((first - start) * 1e3)
                times.e2e.append((time.perf_counter() - start) * 1e3)

        if rate:
            async with asyncio.TaskGroup() as asked:
                source, due = random.Random(1), time.perf_counter()
                while due < ends:
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    asked.create_task(ask())
                    due += source.expovariate(rate)
        else:
            while time.perf_counter() < ends:
                await ask()
    return {
        "requests": len(times.e2e),
        **{f"ttft_p{p}_ms": percentile(times.ttft, p) for p in (5, 50, 99)},
        **{f"e2e_p{p}_ms": percentile(times.e2e, p) for p in (5, 50, 99)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.0, help="0 = one after the other")
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    print(json.dumps(uvloop.run(measure(args.address, args.tokens, args.seconds, args.rate))))


if __name__ == "__main__":
    main()
