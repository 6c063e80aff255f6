"""Large clusters on real traces: each policy's goodput at 90 % attainment, and how fast it runs.

Llama-2-70B on 8 GPUs an instance, speeds fitted to Splitwise's measurements (A100 and H100), half
of the instances for prompts and half for tokens. Heterogeneous: half of each pool is A100, half
H100. Traces are replayed faster than they were recorded; copies with prefixes of their own follow
each other so that a fast replay still lasts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.sim import Scenario, parse_scenario, run_scenario, search_goodput, with_policy
from isthmus.sim.build import make_calls
from isthmus.sim.run import Probe
from isthmus.workload import at_rate

HARDWARE = {"a100": "a100-80gb", "h100": "h100-80gb"}
LINK_GB_PER_S = {"a100": 25.0, "h100": 50.0}


@dataclass(frozen=True, slots=True)
class Load:
    """``seconds_each``: of prefill on an A100 instance, roughly: a first guess of the rate."""

    name: str
    trace: Path
    ttft_ms: float
    tpot_ms: float
    block_size: int


@dataclass(frozen=True, slots=True)
class Result:
    load: str
    kinds: str
    num_instances: int
    policy: str
    goodput: float
    attainment: float
    probes: tuple[Probe, ...]
    cpu_s: float


def scenario_of(
    load: Load, profile: Path, kinds: tuple[str, ...], num_instances: int, calls: int, copies: int
) -> Scenario:
    each = num_instances // 2 // len(kinds)
    pools: list[dict[str, Any]] = [
        {
            "role": role,
            "count": each,
            "tp": 8,
            "profile": {
                "kind": "splitwise",
                "file": str(profile),
                "model": "llama2-70b",
                "hardware": HARDWARE[kind],
            },
            "block_size": load.block_size,
            # A chunk beside decodes must not take much longer than a token may.
            "max_num_batched_tokens": 2_048 if role == "prefill" else 512,
            "max_num_seqs": 256,
            "link_gb_per_s": LINK_GB_PER_S[kind],
        }
        for role in ("prefill", "decode")
        for kind in kinds
    ]
    return parse_scenario(
        {
            "name": f"{load.name}, {num_instances} × {'+'.join(kinds)}",
            "pools": pools,
            "workload": {"trace": str(load.trace), "requests": calls, "copies": copies},
            "classes": {"default": {"ttft_ms": load.ttft_ms, "tpot_ms": load.tpot_ms}},
            "warm_up": 0.1,
        },
        Path(),
    )


def goodputs(
    scenario: Scenario, load: Load, kinds: tuple[str, ...], policies: list[str], tolerance: float
) -> Iterator[Result]:
    start = 0.15 * scenario.num_instances
    for policy in policies:
        began = time.process_time()
        found = search_goodput(
            with_policy(scenario, policy), tolerance=tolerance, start=start, on_probe=tell
        )
        start = found.rate or start
        yield Result(
            load=load.name,
            kinds="+".join(kinds),
            num_instances=scenario.num_instances,
            policy=policy,
            goodput=found.rate,
            attainment=found.best.total.attainment if found.best else 0.0,
            probes=found.probes,
            cpu_s=time.process_time() - began,
        )


def tell(probe: Probe) -> None:
    print(f"    {probe.rate:8.2f}/s  {probe.attainment:6.1%} good", flush=True)


def at_a_rate(scenario: Scenario, policy: str, rate: float) -> dict[str, float]:
    cpu = time.process_time()
    calls = at_rate(make_calls(scenario), rate)
    total = run_scenario(with_policy(scenario, policy), calls).report.total
    return {
        "rate": rate,
        "attainment": total.attainment,
        "ttft_attainment": total.ttft_attainment,
        "tpot_attainment": total.tpot_attainment,
        "cpu_s": time.process_time() - cpu,
    }


def speed(scenario: Scenario, policy: str) -> dict[str, float]:
    """One run at the trace's own times."""
    wall, cpu = time.perf_counter(), time.process_time()
    report = run_scenario(with_policy(scenario, policy)).report
    return {
        "instances": scenario.num_instances,
        "requests": report.total.num_offered,
        "simulated_s": report.simulated_s,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "events": report.num_events,
        "reports": report.num_reports,
        "attainment": report.total.attainment,
    }
