"""Do predicted quantiles hold, live, and again after an instance has become half as fast?

A pair serves calls at a steady rate under one class. After ``--calls`` of them the gateway's
``isthmus_prediction_coverage`` is read, with ``isthmus_promises_kept_ratio``; then the processes of
one instance are stopped for half of every ``PERIOD_MS`` by SIGSTOP, calls go on for ``--slow-s``
seconds, and the gauges are read again every few seconds. They count the last 200 times of each kind
and size, so that what they say soon after the change is partly of before.

``python -m benchmarks.coverage --slow decode`` writes ``coverage-decode.json`` to benchmarks/out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass

from benchmarks.cluster import MODEL_NAME, OUT, PAIR, VOCAB, Running, serve
from benchmarks.export_model import export
from benchmarks.machine import ForeignCpu, describe, tree
from benchmarks.scrape import scrape
from isthmus.controlplane.client import InstanceStatus
from isthmus.loadgen import Endpoint, Record, Targets, run_calls, summarise
from isthmus.loadgen.plan import LoadPlan
from isthmus.loadgen.prompts import PromptMaker
from isthmus.workload import Call, Mix, Share, parse_lengths
from isthmus.workload.figures import written

PERIOD_MS = 20.0
LOOK_S = 5.0
COVERAGE, KEPT = "isthmus_prediction_coverage", "isthmus_promises_kept_ratio"


@dataclass(frozen=True, slots=True)
class Look:
    """The gauges of one kind of time at one moment, ``at_s`` from the first call."""

    at_s: float
    kind: str
    quantile: float
    coverage: float
    kept: float
    is_slow: bool

    @property
    def error(self) -> float:
        return self.coverage - self.quantile


@asynccontextmanager
async def half_speed(pid: int) -> AsyncIterator[None]:
    """The process tree runs half of the time, in turns too short for anybody to miss it."""
    pids = [process.pid for process in tree(pid)]

    async def duty() -> None:
        while True:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                _send(pids, number)
                await asyncio.sleep(PERIOD_MS / 2e3)

    task = asyncio.create_task(duty())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        _send(pids, signal.SIGCONT)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def looks(cluster: Running, at_s: float, is_slow: bool) -> list[Look]:
    seen = await scrape(cluster.url)
    return [
        Look(
            at_s,
            dict(labels)["kind"],
            float(dict(labels)["quantile"]),
            value,
            seen.values[KEPT, labels],
            is_slow,
        )
        for (name, labels), value in seen.values.items()
        if name == COVERAGE
    ]


async def measure(cluster: Running, args: argparse.Namespace) -> tuple[list[Record], list[Look]]:
    targets = Targets(args.ttft_ms, args.tpot_ms)
    num_slow = round(args.slow_s * args.rate)
    mix = Mix((Share(1.0, parse_lengths(args.prompt), parse_lengths(args.answer)),))
    calls = LoadPlan(args.calls + num_slow, args.seed, mix).calls(args.rate)
    found: list[Look] = []
    endpoint = Endpoint(cluster.url, MODEL_NAME, timeout_s=60, deadline_s=120, targets=targets)
    async with endpoint:
        warm = [Call(-1 - i, 0.0, 40, 4) for i in range(2)]
        await run_calls(endpoint, warm, PromptMaker(args.seed + 1, VOCAB))
        started = asyncio.get_running_loop().time()

        async def watch() -> None:
            """A look when the first ``--calls`` have been sent, then slow, and looks."""
            change_s = calls[args.calls].due_s
            await asyncio.sleep(change_s)
            found.extend(await looks(cluster, change_s, is_slow=False))
            show(found[-3:])
            async with half_speed(_pid_of(await cluster.fetch_instances(), args.slow)):
                while True:
                    await asyncio.sleep(LOOK_S)
                    at_s = asyncio.get_running_loop().time() - started
                    found.extend(await looks(cluster, at_s, is_slow=True))

        watcher = asyncio.create_task(watch())
        try:
            records = await run_calls(endpoint, calls, PromptMaker(args.seed, VOCAB))
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
    return records, found


def _pid_of(instances: Iterable[InstanceStatus], role: str) -> int:
    (found,) = [item for item in instances if item.role.value == role]
    return found.pid


def show(seen: list[Look]) -> None:
    for look in seen:
        print(
            f"{look.at_s:6.1f} s {'slow' if look.is_slow else '    '} {look.kind:10} q "
            f"{look.quantile:g}: {look.coverage:.3f} ({look.error:+.3f}), kept {look.kept:.3f}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="before the change")
    parser.add_argument("--rate", type=float, default=2.5, help="requests/s")
    parser.add_argument("--slow", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--slow-s", type=float, default=60.0, help="calls after the change")
    parser.add_argument("--prompt", default="33-48", help="tokens")
    parser.add_argument("--answer", default="4-7")
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--ttft-ms", type=float, default=3_000.0)
    parser.add_argument("--tpot-ms", type=float, default=400.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    OUT.mkdir(exist_ok=True)
    model = export((OUT / "sample-bf16").resolve())
    with serve(model, *PAIR, "--set", f"router.policy={args.policy}") as cluster:
        foreign = ForeignCpu()
        records, found = asyncio.run(measure(cluster, args))
        foreign_share = foreign.share()
    show(found)
    targets = Targets(args.ttft_ms, args.tpot_ms)
    parts = {"before": records[: args.calls], "slow": records[args.calls :]}
    summaries = {name: summarise(part, targets) for name, part in parts.items() if part}
    for name, summary in summaries.items():
        print(
            f"{name:7} {summary.offered_rate:.2f}/s, {summary.attainment:.1%} good, TTFT p50 "
            f"{written(summary.ttft.p50)} p90 {written(summary.ttft.p90)}, TPOT p50 "
            f"{written(summary.tpot.p50, 1)} p90 {written(summary.tpot.p90, 1)} ms"
        )
    print(f"foreign CPU {foreign_share:.0%}")
    state = {
        "machine": describe(),
        "arguments": vars(args),
        "looks": [asdict(look) for look in found],
        "runs": {name: summary.as_json() for name, summary in summaries.items()},
        "foreign_cpu": foreign_share,
    }
    file = OUT / f"coverage-{args.slow}.json"
    file.write_text(json.dumps(state, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
