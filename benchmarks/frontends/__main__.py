"""Requests a second of frontend CPU time: the gateway beside other routers and frontends.

``make bench ARGS="frontends --only isthmus dynamo-kv"``. Each side streams ``--tokens`` tokens a
request from mock workers that answer at once, at one request and at many at a time. Peers that are
not installed in ``--venvs`` are left out (``benchmarks/frontends/setup.sh VENVS`` installs them).
A side's figures are kept until it is measured again; a side has a row for each ``--step-ms``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.cluster import MODEL_NAME, OUT
from benchmarks.export_model import export as export_model
from benchmarks.frontends.report import table
from benchmarks.frontends.sides import (
    LOAD_CORE,
    SIDES,
    Frontend,
    Plan,
    SideUnavailable,
    running,
)
from benchmarks.machine import ForeignCpu, describe

PATH = "/v1/chat/completions"
READY_S = 90.0


def wait_until_it_answers(frontend: Frontend, num_tokens: int) -> None:
    """Discovery takes some seconds in most of them. Raises SideUnavailable."""
    body = {
        "model": MODEL_NAME, "stream": True, "max_tokens": num_tokens,
        "messages": [{"role": "user", "content": "are you there"}],
    }  # fmt: skip
    ends, said = time.monotonic() + READY_S, ""
    while time.monotonic() < ends:
        try:
            answer = httpx.post(frontend.url + PATH, json=body, timeout=5, trust_env=False)
            said = answer.text
            if answer.status_code == 200 and "[DONE]" in said:
                return
        except httpx.HTTPError as error:
            said = repr(error)
        time.sleep(0.3)
    raise SideUnavailable(f"no answer within {READY_S:.0f} s: {said[:300]}")


def load(
    url: str, pid: int, concurrency: int, args: argparse.Namespace, rate: float = 0.0
) -> dict[str, float]:
    command = [
        "taskset", "-c", str(LOAD_CORE), sys.executable, "-m", "benchmarks.frontends.load",
        "--url", url + PATH, "--model", MODEL_NAME, "--pid", str(pid),
        "--concurrency", str(concurrency), "--rate", str(rate), "--tokens", str(args.tokens),
        "--seconds", str(args.seconds), "--warm-s", str(args.warm_s),
    ]  # fmt: skip
    return dict(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


def beside(
    frontend: Frontend, args: argparse.Namespace, rate: float = 0.0
) -> dict[str, float] | None:
    """The same requests to the mock worker itself, one at a time or so many a second; None where
    none can be sent."""
    if frontend.worker_url:
        return load(frontend.worker_url, frontend.pid, 1, args, rate)
    if not frontend.decode_address:
        return None
    command = [
        "taskset", "-c", str(LOAD_CORE), sys.executable, "-m", "benchmarks.frontends.direct",
        "--address", frontend.decode_address, "--tokens", str(args.tokens),
        "--seconds", str(args.seconds), "--rate", str(rate),
    ]  # fmt: skip
    return dict(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))


def measure_side(name: str, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    with running(name, plan) as frontend:
        wait_until_it_answers(frontend, plan.num_tokens)
        foreign = ForeignCpu()
        result: dict[str, Any] = {"tokens": args.tokens, "beside": beside(frontend, args)}
        for concurrency in args.concurrency:
            result[str(concurrency)] = load(frontend.url, frontend.pid, concurrency, args)
        for rate in args.rate:
            result[f"{rate:g}/s"] = load(frontend.url, frontend.pid, 1, args, rate)
            result[f"{rate:g}/s beside"] = beside(frontend, args, rate)
        result["foreign_cores"] = round(foreign.share(), 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--venvs", type=Path, default=OUT.parent.parent / ".venvs")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="also so many a second")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=0.0, help="0 = all tokens at once")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each figure")
    parser.add_argument("--warm-s", type=float, default=2.0)
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    file = OUT / "frontends.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in () if args.report_only else args.only:
        with TemporaryDirectory(prefix="isthmus-front-", ignore_cleanup_errors=True) as folder:
            plan = Plan(
                args.venvs,
                export_model(OUT / "sample-bf16"),
                Path(folder),
                args.tokens,
                args.step_ms,
            )
            try:
                figures = measure_side(name, plan, args)
            except SideUnavailable as reason:
                print(f"{name} is left out: {reason}", file=sys.stderr)
                continue
        results[f"{name} {args.step_ms:g}"] = {**figures, "machine": describe()}
        file.write_text(json.dumps(results, indent=1))
    text = table(results)
    (OUT / "frontends.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
