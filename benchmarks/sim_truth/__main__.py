"""Does the simulator tell the truth? A live pair at several rates beside its own simulation.

One prefill and one decode instance serve the same calls at each rate as the simulator is given;
its instances are the profiles that were saved of the live ones under load, the router's policy and
the targets are the same. Each rate's goodput, attainment and percentiles are printed side by side.
A machine that others use as well is not equally fast at all times, which no profile can know.

``python -m benchmarks.sim_truth --rates 1.2,1.8,2.4`` writes ``sim-truth/`` to benchmarks/out;
``--replay`` simulates again what it holds, without a cluster.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.cluster import OUT, PAIR
from benchmarks.export_model import export
from benchmarks.machine import describe
from benchmarks.sim_truth.live import Live, LiveRun, Plan, measure
from benchmarks.sim_truth.report import Pair, table
from benchmarks.sim_truth.simulated import (
    Overheads,
    Setting,
    save_profiles,
    scenario_of,
    simulate,
)
from isthmus.common.config import LoggingConfig
from isthmus.common.logging import configure_logging
from isthmus.loadgen import Targets, summarise
from isthmus.loadgen.plan import LoadPlan
from isthmus.workload import Mix, Share, parse_lengths


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="1.2,1.8,2.4", help="offered, requests/s")
    parser.add_argument("--calls", type=int, default=44, help="of one run")
    parser.add_argument("--calibration", type=int, default=20, help="calls to profile under")
    parser.add_argument("--prompt", default="40-96", help="tokens")
    parser.add_argument("--answer", default="12-24")
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--ttft-ms", type=float, default=900.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--model", help="default: the sample, in bf16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT / "sim-truth")
    parser.add_argument("--replay", action="store_true", help="simulate what --out holds")
    return parser.parse_args()


def plan_of(args: argparse.Namespace) -> Plan:
    rates = [float(item) for item in args.rates.split(",")]
    mix = Mix((Share(1.0, parse_lengths(args.prompt), parse_lengths(args.answer)),))
    middle = sorted(rates)[len(rates) // 2]
    return Plan(
        policy=args.policy,
        targets=Targets(args.ttft_ms, args.tpot_ms),
        calibration=LoadPlan(args.calibration, args.seed + 100, mix).calls(middle),
        runs={rate: LoadPlan(args.calls, args.seed, mix).calls(rate) for rate in rates},
        seed=args.seed,
    )


def main() -> None:
    args = parse_arguments()
    configure_logging(LoggingConfig(level="error"))
    if args.replay:
        live, args = load(args.out)
    else:
        model = args.model or export((OUT / "sample-bf16").resolve())
        live = measure(model, PAIR, plan_of(args), lambda so_far: save(args, so_far))
    pairs = compare(live, args)
    text = table(pairs)
    (args.out / "sim-truth.md").write_text(text, "utf-8")
    print(text)


def compare(live: Live, args: argparse.Namespace) -> list[Pair]:
    overheads = Overheads.of(live.lone.stages, live.calibration.stages)
    targets = Targets(args.ttft_ms, args.tpot_ms)
    setting = Setting(args.policy, targets, args.seed, overheads)
    profiles = live.calibration.profiles()
    files = save_profiles(profiles, args.out / "profiles")
    predicted = scenario_of(profiles, files, setting)
    pairs = []
    for run in live.runs:
        report = simulate(predicted, [record.call for record in run.records])
        pairs.append(Pair(run.rate, summarise(run.records, targets), report, run.foreign_cpu))
    return pairs


def save(args: argparse.Namespace, live: Live) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    arguments = {key: str(value) for key, value in vars(args).items() if key != "out"}
    arguments |= {"ttft_ms": args.ttft_ms, "tpot_ms": args.tpot_ms, "seed": args.seed}
    state: dict[str, Any] = {
        "machine": describe(),
        "arguments": arguments,
        "lone": live.lone.as_json(),
        "calibration": live.calibration.as_json(),
        "runs": [run.as_json() for run in live.runs],
    }
    (args.out / "live.json").write_text(json.dumps(state, indent=1), "utf-8")


def load(folder: Path) -> tuple[Live, argparse.Namespace]:
    state = json.loads((folder / "live.json").read_text("utf-8"))
    live = Live(
        LiveRun.from_json(state["lone"]),
        LiveRun.from_json(state["calibration"]),
        [LiveRun.from_json(run) for run in state["runs"]],
    )
    return live, argparse.Namespace(**state["arguments"], out=folder)


if __name__ == "__main__":
    main()
