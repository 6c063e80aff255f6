"""What overload leaves standing: two classes at up to three times what a pair can serve, live.

``critical`` is strict and weighs four times as much as ``batch``, which is best effort; both have
the same targets. Each multiple of ``--capacity`` is offered for ``--seconds`` to one pair under the
goodput policy, and whoever has no whole answer ``--patience-s`` after his call gives up. For each,
the attainment of either class and the goodput of both beside the best of all multiples.

``python -m benchmarks.overload --capacity 2.2`` writes ``overload.json`` to benchmarks/out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import MODEL_NAME, OUT, PAIR, VOCAB, Running, serve
from benchmarks.export_model import export
from benchmarks.machine import ForeignCpu, describe
from isthmus.loadgen import Endpoint, Record, Summary, Targets, run_calls, summarise
from isthmus.loadgen.plan import LoadPlan
from isthmus.loadgen.prompts import PromptMaker
from isthmus.workload import Call, Mix, Share, parse_lengths

CRITICAL, BATCH = "critical", "batch"
WEIGHTS = {CRITICAL: 4.0, BATCH: 1.0}
MODES = {CRITICAL: "strict", BATCH: "best_effort"}


@dataclass(frozen=True, slots=True)
class Load:
    """Of one multiple of the capacity: both classes together and each alone."""

    multiple: float
    total: Summary
    classes: dict[str, Summary]
    foreign_cpu: float

    def as_json(self) -> dict[str, Any]:
        return {
            "multiple": self.multiple,
            "total": self.total.as_json(),
            "classes": {name: summary.as_json() for name, summary in self.classes.items()},
            "foreign_cpu": self.foreign_cpu,
        }


def class_flags(targets: Targets, quantile: float) -> list[str]:
    """Both classes as ``isthmus up`` takes them."""
    flags = []
    for name, mode in MODES.items():
        keys = {
            "ttft_ms": targets.ttft_ms, "tpot_ms": targets.tpot_ms, "quantile": quantile,
            "weight": WEIGHTS[name], "mode": mode,
        }  # fmt: skip
        for key, value in keys.items():
            flags += ["--set", f"slo.classes.{name}.{key}={value}"]
    return flags


def by_class(records: Sequence[Record], targets: Targets) -> dict[str, Summary]:
    """A summary of each class that has a call."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.call.slo_class, []).append(record)
    return {name: summarise(group, targets) for name, group in sorted(groups.items())}


async def offer(cluster: Running, args: argparse.Namespace, targets: Targets) -> list[Load]:
    lengths = parse_lengths(args.prompt), parse_lengths(args.answer)
    mix = Mix(
        (Share(args.critical, *lengths, CRITICAL), Share(1.0 - args.critical, *lengths, BATCH))
    )
    endpoint = Endpoint(
        cluster.url, MODEL_NAME, timeout_s=60, deadline_s=args.patience_s
    )  # classes bring the targets
    loads: list[Load] = []
    async with endpoint:
        warm = [Call(-1 - i, 0.0, 64, 4, slo_class=BATCH) for i in range(2)]
        await run_calls(endpoint, warm, PromptMaker(args.seed + 1, VOCAB))
        for number, multiple in enumerate(args.multiples):
            rate = args.capacity * multiple
            calls = LoadPlan(round(rate * args.seconds), args.seed, mix).calls(rate)
            foreign = ForeignCpu()
            records = await run_calls(endpoint, calls, PromptMaker(args.seed + 10 + number, VOCAB))
            load = Load(
                multiple, summarise(records, targets), by_class(records, targets), foreign.share()
            )
            loads.append(load)
            print(line(load), flush=True)
    return loads


def line(load: Load) -> str:
    total = load.total
    parts = [f"{load.multiple:g} × : {total.offered_rate:.2f}/s, goodput {total.goodput:.2f}/s"]
    for name, summary in load.classes.items():
        verdicts = ", ".join(f"{n} {what}" for what, n in summary.verdicts.items() if n)
        parts.append(f"{name} {summary.attainment:.1%} ({verdicts})")
    return "; ".join([*parts, f"foreign CPU {load.foreign_cpu:.0%}"])


def table(loads: Sequence[Load]) -> str:
    peak = max(load.total.goodput for load in loads)
    lines = [
        "| of capacity | offered | goodput | of the best | critical good | batch good |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for load in loads:
        shares = [
            f"{load.classes[name].attainment:.1%}" if name in load.classes else "–"
            for name in (CRITICAL, BATCH)
        ]
        total = load.total
        lines.append(
            f"| {load.multiple:g} × | {total.offered_rate:.2f}/s | {total.goodput:.2f}/s "
            f"| {total.goodput / max(peak, 1e-9):.0%} | {shares[0]} | {shares[1]} |"
        )
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=float, default=2.0, help="requests/s that are good")
    parser.add_argument(
        "--multiples", type=lambda text: [float(part) for part in text.split(",")],
        default=[0.7, 1.0, 2.0, 3.0],
    )  # fmt: skip
    parser.add_argument("--critical", type=float, default=0.25, help="their share of the calls")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--patience-s", type=float, default=10.0)
    parser.add_argument("--prompt", default="64-192", help="tokens")
    parser.add_argument("--answer", default="16-32")
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--ttft-ms", type=float, default=1_200.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--quantile", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    OUT.mkdir(exist_ok=True)
    model = export((OUT / "sample-bf16").resolve())
    targets = Targets(args.ttft_ms, args.tpot_ms)
    flags = [*PAIR, "--set", f"router.policy={args.policy}", *class_flags(targets, args.quantile)]
    with serve(model, *flags) as cluster:
        loads = asyncio.run(offer(cluster, args, targets))
    state = {
        "machine": describe(),
        "arguments": vars(args),
        "loads": [load.as_json() for load in loads],
    }
    (OUT / "overload.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    print(table(loads))


if __name__ == "__main__":
    main()
