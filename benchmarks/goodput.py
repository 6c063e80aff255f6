"""Goodput of one prefill + one decode instance against two mixed ones, and of policies, live.

Every side serves the same calls at the same times, rate by rate, on the same cores. The targets are
``--slack`` times what a lone request sees on one mixed instance (medians over the mix). A call is
good when it met both; attainment is the share of good ones among all that were offered, goodput
their number a second. Sides are interleaved at every rate, so that a slower hour of the machine
does not fall on one of them.

``python -m benchmarks.goodput --mix long --rates 0.2,0.4,0.6`` writes ``goodput-long.json``,
``.md`` and ``.png`` to benchmarks/out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cluster import MODEL_NAME, OUT, Running, serve
from benchmarks.export_model import export
from benchmarks.machine import ForeignCpu, describe
from isthmus.loadgen import Endpoint, Record, Summary, Targets, run_calls, summarise
from isthmus.loadgen.plan import LoadPlan
from isthmus.loadgen.plots import plot_rates
from isthmus.loadgen.prompts import PromptMaker
from isthmus.workload import Call, Mix, Share, parse_lengths
from isthmus.workload.figures import written

# Prompt and answer lengths. The long mix is what disaggregation is for: one prompt more beside an
# answer takes longer than the whole answer may be delayed.
MIXES = {
    "long": Mix((Share(1.0, parse_lengths("384-640"), parse_lengths("8-24")),)),
    "short": Mix((Share(1.0, parse_lengths("16-48"), parse_lengths("16-48")),)),
    "both": Mix(
        (
            Share(0.5, parse_lengths("256-768"), parse_lengths("8-16")),
            Share(0.5, parse_lengths("16-48"), parse_lengths("32-64")),
        )
    ),
}
SHAPES = {
    "pair": ("--prefill", "1", "--decode", "1"),
    "mixed": ("--prefill", "0", "--decode", "0", "--mixed", "2"),
}
ONE_MIXED = ("--prefill", "0", "--decode", "0", "--mixed", "1")
NUM_UNLOADED = 8
VOCAB = 49_152
ENOUGH = 0.9


@dataclass(frozen=True, slots=True)
class Side:
    """One arrangement of two cores under one policy. ``told``: ``untold`` = requests do not say
    what targets they are judged by, so that chunks of prompts fill the token budget."""

    shape: str
    policy: str
    told: str = "told"

    def __post_init__(self) -> None:
        if self.told not in {"told", "untold"}:
            raise SystemExit(f"'{self.told}' of a side is neither told nor untold")

    @property
    def is_told(self) -> bool:
        return self.told == "told"

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.policy}" + ("" if self.is_told else ", untold")

    @property
    def flags(self) -> tuple[str, ...]:
        return (*SHAPES[self.shape], "--set", f"router.policy={self.policy}")


def unloaded_targets(
    model: Path, mix: Mix, slack: float, seed: int, more: Sequence[str] = ()
) -> Targets:
    """Medians of lone requests on one mixed instance with one core, times ``slack``."""
    calls = LoadPlan(NUM_UNLOADED, seed, mix).calls(1.0)
    with serve(model, *ONE_MIXED, "--set", "mixed.cpus=[0]", *more) as cluster:
        records = []
        for call in calls:
            alone = [Call(call.index, 0.0, call.num_prompt_tokens, call.num_output_tokens)]
            records += asyncio.run(_send(cluster, alone, seed + 1, Targets()))
    summary = summarise(records, Targets())
    return Targets(summary.ttft.p50, summary.tpot.p50).scaled(slack)


async def _send(
    cluster: Running, calls: Sequence[Call], seed: int, targets: Targets
) -> list[Record]:
    endpoint = Endpoint(cluster.url, MODEL_NAME, timeout_s=300, targets=targets)
    async with endpoint:
        return await run_calls(endpoint, calls, PromptMaker(seed, VOCAB))


def measure(
    model: Path,
    side: Side,
    calls: Sequence[Call],
    targets: Targets,
    seed: int,
    more: Sequence[str] = (),
) -> Summary:
    """One run on a fresh cluster: nothing of an earlier rate waits or is cached. ``more``: flags of
    ``isthmus up``."""
    with serve(model, *side.flags, *more) as cluster:
        warm = [Call(-1 - i, 0.0, 64, 4) for i in range(2)]
        asyncio.run(_send(cluster, warm, seed + 2, targets))
        foreign = ForeignCpu()
        told = targets if side.is_told else Targets()
        records = asyncio.run(_send(cluster, calls, seed, told))
        foreign_share = foreign.share()
    summary = summarise(records, targets)
    print(
        f"{side.name:28} {summary.offered_rate:.3g}/s: {summary.attainment:5.1%} good, goodput "
        f"{summary.goodput:.3g}/s, TTFT p90 {written(summary.ttft.p90)}, TPOT p90 "
        f"{written(summary.tpot.p90, 1)} ms, foreign CPU {foreign_share:.0%}",
        flush=True,
    )
    return summary


def best_goodput(summaries: Sequence[Summary]) -> float:
    return max(summary.goodput for summary in summaries)


def rate_at(summaries: Sequence[Summary], enough: float) -> float:
    """The offered rate at which attainment falls below ``enough``, between two measured ones; 0
    when the lowest rate is too much already."""
    ordered = sorted(summaries, key=lambda summary: summary.offered_rate)
    passed = 0.0
    for before, after in zip([None, *ordered], ordered, strict=False):
        if after.attainment >= enough:
            passed = after.offered_rate
            continue
        if before is not None and before.attainment >= enough:
            share = (before.attainment - enough) / (before.attainment - after.attainment)
            passed += share * (after.offered_rate - before.offered_rate)
        break
    return passed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", choices=MIXES, default="long")
    parser.add_argument("--rates", default="0.2,0.3,0.4,0.5", help="offered, requests/s")
    parser.add_argument("--calls", type=int, default=40, help="of one run")
    parser.add_argument("--slack", type=float, default=3.0)
    parser.add_argument(
        "--sides",
        default="pair:goodput,mixed:goodput,mixed:round_robin,mixed:round_robin:untold",
        help="shape:policy, or shape:policy:untold where requests do not name their targets",
    )
    parser.add_argument("--ttft-ms", type=float, help="targets; default: measured")
    parser.add_argument("--tpot-ms", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--step-tokens", type=int, default=768, help="of each instance: the longest prompt, whole"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    OUT.mkdir(exist_ok=True)
    model = export((OUT / "sample-bf16").resolve())
    mix = MIXES[args.mix]
    sides = [Side(*item.split(":")) for item in args.sides.split(",")]
    more = ("--max-num-batched-tokens", str(args.step_tokens))
    if args.ttft_ms and args.tpot_ms:
        targets = Targets(args.ttft_ms, args.tpot_ms)
    else:
        targets = unloaded_targets(model, mix, args.slack, args.seed, more)
    print(f"targets: TTFT {targets.ttft_ms:.0f} ms, TPOT {targets.tpot_ms:.1f} ms", flush=True)
    found: dict[str, list[Summary]] = {side.name: [] for side in sides}
    for rate in (float(item) for item in args.rates.split(",")):
        calls = LoadPlan(args.calls, args.seed, mix).calls(rate)
        for side in sides:
            found[side.name].append(measure(model, side, calls, targets, args.seed, more))
    write(args, targets, found)


def write(args: argparse.Namespace, targets: Targets, found: dict[str, list[Summary]]) -> None:
    stem = OUT / f"goodput-{args.mix}"
    rows = ["| side | best goodput (1/s) | rate at 90 % (1/s) |", "| --- | ---: | ---: |"]
    for name, summaries in found.items():
        at_enough = rate_at(summaries, ENOUGH)
        rows.append(f"| {name} | {best_goodput(summaries):.3g} | {at_enough:.3g} |")
    text = (
        f"{args.mix} mix, TTFT ≤ {targets.ttft_ms:.0f} ms and TPOT ≤ {targets.tpot_ms:.1f} ms, "
        f"{args.calls} calls a rate.\n\n" + "\n".join(rows) + "\n"
    )
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    state = {
        "machine": describe(),
        "targets": asdict(targets),
        "arguments": vars(args),
        "sides": {name: [s.as_json() for s in made] for name, made in found.items()},
    }
    stem.with_suffix(".json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    plot_rates(stem.with_suffix(".png"), dict(found), ENOUGH)
    print(text)


if __name__ == "__main__":
    main()
