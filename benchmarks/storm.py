"""A thousand requests that behave badly, a SIGKILL of each role's worker under way, nothing leaks.

``python -m benchmarks.storm`` starts a cluster of the sample model, storms it (see
``tests/support/storm.py``) and then checks that every request is accounted for, that every pool is
at rest and clean, and that the cluster serves without help. Exits with 1 when one of it fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable

import httpx

from benchmarks.cluster import MODEL_NAME, OUT, Running, serve
from isthmus.common.cluster import Role
from tests.support.storm import StormShape, Tally, storm


def kill_worker(pid: int) -> Callable[[], Awaitable[None]]:
    async def kill() -> None:
        print(f"SIGKILL to worker {pid}", flush=True)
        os.kill(pid, signal.SIGKILL)

    return kill


def wait_at_rest(running: Running, timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            problems = running.integrity_problems()
        except Exception as error:  # noqa: BLE001 - an instance that restarts does not answer yet
            problems = [repr(error)]
        if not problems or time.monotonic() > deadline:
            return problems
        time.sleep(0.5)


def report(tally: Tally, problems: list[str], served: int, seconds: float) -> bool:
    result = {
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "total": tally.total,
        "unexplained": tally.unexplained[:10],
        "integrity_problems": problems,
        "served_after": served,
    }
    OUT.mkdir(exist_ok=True)
    (OUT / "storm.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return not tally.unexplained and not problems and served == 10


def serve_ten(url: str) -> int:
    """How many of ten plain requests are answered in full."""
    body = {"model": MODEL_NAME, "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    good = 0
    with httpx.Client(timeout=60, trust_env=False) as client:
        for _ in range(10):
            answer = client.post(f"{url}/v1/completions", json=body)
            good += answer.status_code == 200
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--longest-prompt", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--actuator", choices=("ray", "process"), default="ray")
    args = parser.parse_args()
    shape = StormShape(
        num_requests=args.requests,
        concurrency=args.concurrency,
        vocab=40_000,
        longest_prompt=args.longest_prompt,
        max_tokens=args.max_tokens,
    )
    with serve("sample", "--actuator", args.actuator) as running:
        print(f"ready after {running.ready_s:.1f} s", flush=True)
        pid_by_role = {instance.role: instance.pid for instance in running.instances()}
        at = {
            args.requests // 3: kill_worker(pid_by_role[Role.PREFILL]),
            2 * args.requests // 3: kill_worker(pid_by_role[Role.DECODE]),
        }
        started = time.monotonic()
        tally = asyncio.run(storm(running.url, MODEL_NAME, shape, at))
        seconds = time.monotonic() - started
        problems = wait_at_rest(running, 60)
        is_good = report(tally, problems, serve_ten(running.url), seconds)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
