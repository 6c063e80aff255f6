"""The simulator against DistServe's, large clusters on real traces, and its own speed.

::

    make bench ARGS="simulator reference --profiles DIR [--colocated FILE]"
    make bench ARGS="simulator scale --profiles DIR --traces DIR [--instances 64 256]"
    make bench ARGS="simulator points --profiles DIR --traces DIR --rates 60 80 [--kinds a100 h100]"
    make bench ARGS="simulator table --profiles DIR --traces DIR --out DIR --policies goodput ..."
    make bench ARGS="simulator speed --profiles DIR --traces DIR [--instances 64 1024 10000]"

``table`` bisects too, keeps every run in ``--out`` and goes on where it was interrupted. Each takes
the options that it has a use for and refuses the others.
``DIR``s hold the published profiles and traces, which are not part of the repository.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster import OUT
from benchmarks.simulator.reference import MAX_DIFFERENCE, compare, plan, their_goodput
from benchmarks.simulator.scale import Load, at_a_rate, goodputs, scenario_of, speed
from benchmarks.simulator.sheet import write
from benchmarks.simulator.table import KINDS, Cell, Point, Runs, cells, fill
from isthmus.common.config import LoggingConfig
from isthmus.common.errors import ConfigError
from isthmus.common.logging import configure_logging

POLICIES = ["round_robin", "least_loaded", "least_predicted_load"]


def loads(traces: Path) -> dict[str, Load]:
    """TTFT targets are about twice what the longest prompts take on an idle A100 instance."""
    return {
        "mooncake": Load("mooncake", traces / "mooncake_conversation.jsonl", 30_000, 100, 512),
        "azure": Load("azure", traces / "azure_llm_2023_code.csv", 3_000, 100, 64),
    }


def run_reference(args: argparse.Namespace) -> dict[str, Any]:
    profile = args.profiles / "distserve_a100_80g.json"
    colocated = args.colocated or profile
    workloads = {
        name: args.profiles / f"workload_{name}.csv" for name in ("azure_code", "chat_lognormal")
    }
    rows = []
    for row in compare(args.profiles / "distserve_reference.csv", workloads, profile, colocated):
        rows.append(row)
        mark = "" if abs(row.difference) <= MAX_DIFFERENCE else "  <-- differs"
        print(
            f"{row.workload:15} {row.rate:3g}/s {row.backend:9} {row.shape!s:42} "
            f"theirs {row.theirs['joint_attain_pct']:5.1f}  ours "
            f"{row.ours['joint_attain_pct']:5.1f}  {row.difference:+5.1f}{mark}",
            flush=True,
        )
    for backend in ("distserve", "vllm"):
        gaps = [abs(row.difference) for row in rows if row.backend == backend]
        within = sum(gap <= MAX_DIFFERENCE for gap in gaps)
        print(f"{backend}: {within} of {len(gaps)} rows within {MAX_DIFFERENCE:g} points, "
              f"largest difference {max(gaps):.1f}")  # fmt: skip
    plans = {}
    for name, file in workloads.items():
        made = plan(rows, name, file, profile, colocated)
        plans[name] = made.as_json()
        print(f"{name}: goodput per GPU at {made.asked:.0%}, ours and by their table")
        for item in made.candidates:
            theirs = their_goodput(rows, name, item.shape) / item.shape.num_gpus
            print(f"  {item.shape!s:42} {item.goodput_per_gpu:6.3f} {theirs:6.3f}  {item.limit}")
    return {"rows": [asdict(row) for row in rows], "plans": plans}


def run_scale(args: argparse.Namespace) -> dict[str, Any]:
    results = []
    profile = args.profiles / "splitwise_perf_model.csv"
    for name in args.loads:
        load = loads(args.traces)[name]
        for kinds in (("a100",), ("a100", "h100")):
            for size in args.instances:
                scenario = scenario_of(load, profile, kinds, size, args.requests, args.copies)
                print(scenario.name, flush=True)
                found = []
                for result in goodputs(scenario, load, kinds, args.policies, args.tolerance):
                    found.append(result)
                    print(f"  {result.policy:22} {result.goodput:8.2f}/s at 90 %, "
                          f"{result.cpu_s:.0f} s of CPU", flush=True)  # fmt: skip
                others = max((r.goodput for r in found if r.policy != args.policies[-1]), default=0)
                if others:
                    print(f"  {found[-1].policy} / best other: {found[-1].goodput / others:.2f}")
                results += found
    return {"results": [asdict(result) for result in results]}


def run_points(args: argparse.Namespace) -> dict[str, Any]:
    """Attainment of each policy at each of some rates: what ``scale`` bisects."""
    profile = args.profiles / "splitwise_perf_model.csv"
    kinds = tuple(args.kinds or ["a100"])
    results: list[dict[str, Any]] = []
    for name in args.loads:
        load = loads(args.traces)[name]
        for size in args.instances:
            scenario = scenario_of(load, profile, kinds, size, args.requests, args.copies)
            print(scenario.name, flush=True)
            for rate in args.rates:
                for policy in args.policies:
                    probe = at_a_rate(scenario, policy, rate)
                    results.append({"load": name, "instances": size, "policy": policy, **probe})
                    print(f"  {rate:7g}/s  {policy:22} {probe['attainment']:6.1%} good, "
                          f"{probe['cpu_s']:.0f} s of CPU", flush=True)  # fmt: skip
    return {"results": results}


def run_table(args: argparse.Namespace) -> dict[str, Any]:
    """The first policy is held against the best of the others."""
    profile, runs = args.profiles / "splitwise_perf_model.csv", Runs(args.out)

    def on_point(point: Point) -> None:
        print(f"  {point.rate:7g}/s  {point.attainment:6.1%} good, {point.cpu_s:.0f} s of CPU",
              flush=True)  # fmt: skip

    def on_cell(cell: Cell, rate: float | None) -> None:
        print(f"{cell.load} {cell.instances} x {cell.kinds}, part {cell.part + 1}, "
              f"{cell.policy}: {rate or 'none'}", flush=True)  # fmt: skip
        try:
            write(runs, args.policies, args.out)
        except ConfigError as error:
            print(error.message)

    kinds = [tuple(args.kinds)] if args.kinds else KINDS
    wanted = cells(args.loads, kinds, args.instances, args.policies, args.parts)
    fill(runs, wanted, loads(args.traces), profile, on_point, on_cell)
    return {"folder": str(args.out)}


def run_speed(args: argparse.Namespace) -> dict[str, Any]:
    profile = args.profiles / "splitwise_perf_model.csv"
    results = []
    for name in args.loads:
        for size in args.instances:
            load = loads(args.traces)[name]
            scenario = scenario_of(load, profile, ("a100",), size, args.requests, args.copies)
            figures = speed(scenario, args.policies[-1])
            results.append({"load": name, **figures})
            print(f"{name:9} " + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()),
                  flush=True)  # fmt: skip
    return {"results": results}


RUNS = {
    "reference": run_reference,
    "scale": run_scale,
    "points": run_points,
    "table": run_table,
    "speed": run_speed,
}
TRACES = {"traces", "instances", "loads", "policies"}
TAKEN = {
    "reference": {"colocated"},
    "scale": TRACES | {"requests", "copies", "tolerance"},
    "points": TRACES | {"requests", "copies", "kinds", "rates"},
    "table": TRACES | {"kinds", "parts", "out"},
    "speed": TRACES | {"requests", "copies"},
}
"""Options beside ``--profiles`` and ``--save``, which all take."""


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Of the command line, unless others are given. Ends the process when there is one that the
    run would ignore."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=list(RUNS))
    parser.add_argument("--profiles", type=Path, required=True, help="folder")
    parser.add_argument("--save", type=Path, help="JSON")
    options: dict[str, tuple[Any, dict[str, Any]]] = {
        "traces": (Path(), {"type": Path, "help": "folder"}),
        "colocated": (None, {"type": Path, "help": "DistServe's profile of vLLM, JSON"}),
        "instances": ([64], {"type": int, "nargs": "+"}),
        "kinds": ([], {"nargs": "+", "help": "of GPU, side by side"}),
        "rates": ([], {"type": float, "nargs": "+"}),
        "loads": (["mooncake", "azure"], {"nargs": "+"}),
        "policies": (
            POLICIES,
            {"nargs": "+", "help": "the last is held up; of table the first"},
        ),
        "requests": (0, {"type": int, "help": "of a trace, at most; 0 = all"}),
        "copies": (1, {"type": int}),
        "tolerance": (0.05, {"type": float}),
        "parts": ([0], {"type": int, "nargs": "+", "help": "of a trace"}),
        "out": (OUT / "scale", {"type": Path, "help": "folder"}),
    }
    for name, (_, how) in options.items():
        parser.add_argument(f"--{name}", **how)
    args = parser.parse_args(arguments)
    for name, (default, _) in options.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif name not in TAKEN[args.what]:
            parser.error(f"{args.what} has no use for --{name}")
    return args


def main() -> None:
    args = parsed()
    configure_logging(LoggingConfig(level="error"))
    result = RUNS[args.what](args)
    if args.save:
        args.save.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
