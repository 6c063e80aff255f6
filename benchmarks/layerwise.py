"""What of a cold prompt's transfer no compute hides, with KV leaving layer by layer and without.

::

    make bench ARGS="layerwise"                                    # CMA, like blocks
    make bench ARGS="layerwise --tls tcp --decode-block-size 32"   # a slower way, smaller copies

One prefill and one decode instance of the sample model; requests come one at a time, each with a
prompt that nobody has seen. The two settings are started in turns, ``--rounds`` times, so that what
the machine does beside falls on both. For every request:

    exposed     end of the last prefill step → KV complete at the decode instance, as the instance
                counts it (isthmus_kv_exposed_seconds); also as a share of TTFT
    gap         first token → second token at the client; also in steps, which are the median gap
                between later tokens
    prefill     time in steps of the prefill instance (isthmus_step_seconds), and CPU time of the
                thread that computes and of all others there: what copying meanwhile costs

Results go to ``benchmarks/out/layerwise.json`` and ``.png``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cluster import MODEL_NAME, OUT, Running, serve
from benchmarks.load import Progress, follow, random_prompt
from benchmarks.machine import ForeignCpu, describe
from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.errors import ConfigError
from isthmus.workload.plots import new_figure

VOCAB = 49_000
MAX_TOKENS = 32
WARM_UP_TOKENS = 64
START_S = 180.0
# Layers that leave together: as many as make a good piece, and more than there are.
SETTINGS = {"layer-wise": 0, "whole blocks": 1000}
EXPOSED_SHARE_TARGET = 0.05
GAP_STEPS_TARGET = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    ttft_ms: float
    exposed_ms: float
    exposed_share: float  # of TTFT
    gap_ms: float
    step_ms: float
    gap_steps: float
    prefill_ms: float
    compute_cpu_ms: float
    beside_cpu_ms: float  # of the instance's other threads: event loop, connector


class Scrape:
    """Counters of one instance; how far they have moved since they were last asked for."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/metrics"
        self._before: dict[str, float] = {}

    async def moved(self, client: httpx.AsyncClient) -> dict[str, float]:
        """Name of a sample → growth, over all its series."""
        now: dict[str, float] = {}
        for family in text_string_to_metric_families((await client.get(self._url)).text):
            for sample in family.samples:
                now[sample.name] = now.get(sample.name, 0.0) + sample.value
        grown = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now
        return grown


class ThreadTimes:
    """CPU time of the threads of one process; how much each has used since they were last asked."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before: dict[int, float] = {}

    def used(self) -> tuple[float, float]:
        """Seconds of the busiest thread, and of all others together."""
        now = {t.id: t.user_time + t.system_time for t in self._process.threads()}
        grown = sorted(seconds - self._before.get(key, 0.0) for key, seconds in now.items())
        self._before = now
        return grown[-1], sum(grown[:-1])


async def ready_instances(running: Running) -> dict[Role, InstanceInfo]:
    """One of each role; a gateway is ready before all of its instances are."""
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        infos = [instance.info for instance in await running.fetch_instances()]
        ready = {i.role: i for i in infos if i is not None and i.state is InstanceState.READY}
        if {Role.PREFILL, Role.DECODE} <= ready.keys():
            return ready
        await asyncio.sleep(0.5)
    raise RuntimeError("the instances are not ready")


async def measure(running: Running, num_requests: int, num_tokens: int, seed: int) -> list[Sample]:
    infos = await ready_instances(running)
    prefill, decode = (Scrape(infos[role].metrics_address) for role in (Role.PREFILL, Role.DECODE))
    threads = ThreadTimes(infos[Role.PREFILL].pid)
    source = random.Random(seed)
    samples = []
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        for number in range(num_requests + 1):
            length = num_tokens if number else WARM_UP_TOKENS
            prompt, progress = random_prompt(length, VOCAB, source), Progress()
            await asyncio.gather(prefill.moved(client), decode.moved(client))
            threads.used()
            await follow(client, running.url, MODEL_NAME, prompt, MAX_TOKENS, progress)
            if progress.error:
                raise RuntimeError(progress.error)
            used = threads.used()
            there, here = await asyncio.gather(prefill.moved(client), decode.moved(client))
            if number:
                samples.append(sample_of(progress, there, here, used))
    return samples


def sample_of(
    progress: Progress,
    prefill: dict[str, float],
    decode: dict[str, float],
    used: tuple[float, float],
) -> Sample:
    if decode["isthmus_kv_exposed_seconds_count"] != 1:
        raise RuntimeError("the prompt was not computed on the prefill instance")
    ttft_ms = 1e3 * (progress.first - progress.start)
    exposed_ms = 1e3 * decode["isthmus_kv_exposed_seconds_sum"]
    gaps = [1e3 * (later - earlier) for earlier, later in pairwise(progress.chunk_times)]
    step_ms = statistics.median(gaps[1:])
    return Sample(
        ttft_ms=ttft_ms,
        exposed_ms=exposed_ms,
        exposed_share=exposed_ms / ttft_ms,
        gap_ms=gaps[0],
        step_ms=step_ms,
        gap_steps=gaps[0] / step_ms,
        prefill_ms=1e3 * prefill["isthmus_step_seconds_sum"],
        compute_cpu_ms=1e3 * used[0],
        beside_cpu_ms=1e3 * used[1],
    )


def run_setting(args: argparse.Namespace, layers_per_push: int, seed: int) -> list[Sample]:
    flags = [
        "--dtype", "bfloat16", "--actuator", "process",
        "--set", f"transfer.layers_per_push={layers_per_push}",
        "--set", f"prefill.engine.block_size={args.prefill_block_size}",
        "--set", f"decode.engine.block_size={args.decode_block_size}",
    ]  # fmt: skip
    with serve("sample", *flags) as running:
        return asyncio.run(measure(running, args.requests, args.tokens, seed))


def summarise(samples: list[Sample]) -> dict[str, float]:
    """Medians, and the worst exposed share and gap."""
    columns = {name: [asdict(s)[name] for s in samples] for name in asdict(samples[0])}
    medians = {name: statistics.median(values) for name, values in columns.items()}
    worst = {f"worst_{name}": max(columns[name]) for name in ("exposed_share", "gap_steps")}
    return {**medians, **worst}


def table(summaries: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(summaries.values())))
    lines = [f"{'median of all requests':24}" + "".join(f"{name:>16}" for name in summaries)]
    for name in names:
        cells = "".join(f"{summary[name]:16.4f}" for summary in summaries.values())
        lines.append(f"{name:24}{cells}")
    return "\n".join(lines)


def plot(results: dict[str, list[Sample]], title: str, target: Path) -> None:
    """Every request as a point, both settings side by side, with the targets. Raises ConfigError
    without matplotlib."""
    panels = (
        ("exposed transfer, share of TTFT", "exposed_share", EXPOSED_SHARE_TARGET),
        ("second-token gap, steps", "gap_steps", GAP_STEPS_TARGET),
        ("CPU time beside the computing thread, ms", "beside_cpu_ms", None),
    )
    figure, axes = new_figure(len(panels), panel_inches=(4.3, 4.2))
    for axis, (label, name, bound) in zip(axes, panels, strict=True):
        for position, samples in enumerate(results.values()):
            values = [asdict(sample)[name] for sample in samples]
            spread = [position + 0.02 * (i - len(values) / 2) for i in range(len(values))]
            axis.scatter(spread, values, alpha=0.7)
            axis.hlines(statistics.median(values), position - 0.3, position + 0.3, color="black")
        if bound is not None:
            axis.axhline(bound, linestyle=":", color="red", label="target")
            axis.legend(fontsize="small")
        axis.set_xticks(range(len(results)), list(results))
        axis.set_ylim(bottom=0)
        axis.set_title(label)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(target, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompts")
    parser.add_argument("--requests", type=int, default=5, help="measured requests a round")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each setting")
    parser.add_argument("--prefill-block-size", type=int, default=16)
    parser.add_argument("--decode-block-size", type=int, default=16)
    parser.add_argument("--tls", default="", help="UCX_TLS of both instances; '' = UCX chooses")
    parser.add_argument("--out", type=Path, default=OUT / "layerwise.json")
    args = parser.parse_args()
    if args.tls:
        os.environ["UCX_TLS"] = args.tls
    noise, began = ForeignCpu(), time.monotonic()
    results: dict[str, list[Sample]] = {name: [] for name in SETTINGS}
    for number in range(args.rounds):
        for name, layers_per_push in SETTINGS.items():
            results[name] += run_setting(args, layers_per_push, seed=number)
    summaries = {name: summarise(samples) for name, samples in results.items()}
    report = {
        "machine": describe(),
        "foreign_cpu": noise.share(),
        "minutes": (time.monotonic() - began) / 60,
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "targets": {"exposed_share": EXPOSED_SHARE_TARGET, "gap_steps": GAP_STEPS_TARGET},
        "summaries": summaries,
        "samples": {name: [asdict(s) for s in samples] for name, samples in results.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    print(table(summaries))
    print(f"foreign CPU: {report['foreign_cpu']:.2f} cores")
    try:
        title = f"{args.tokens} tokens, {args.tls or 'UCX chooses'}, blocks of "
        title += f"{args.prefill_block_size} → {args.decode_block_size}"
        plot(results, title, args.out.with_suffix(".png"))
    except ConfigError as missing:
        print(f"No plot: {missing.message}.")


if __name__ == "__main__":
    main()
