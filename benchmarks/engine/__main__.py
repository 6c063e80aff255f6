"""Isthmus and its peers on the same weights: TTFT, TPOT, tokens/s, memory, start time.

One command sets the peers up, each in an environment of its own, starts one server after the other
on all cores and measures it. Results are kept in ``benchmarks/out/engine.json`` by side: a run with
``--only`` replaces those sides and leaves the others, so that a slow peer may be measured apart.
The table is ``engine.md``, the plot ``engine.png`` beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster import OUT
from benchmarks.engine.bounds import Bounds, read_shape
from benchmarks.engine.measure import (
    CONCURRENCIES,
    MEMORY,
    START,
    TTFT_REQUESTS,
    Load,
    Reading,
    Round,
    measure_rounds,
    medians,
)
from benchmarks.engine.report import Result, markdown, plot
from benchmarks.export_model import export
from benchmarks.limit import Limits
from benchmarks.limit import measure as measure_limits
from benchmarks.machine import describe
from benchmarks.peers import isthmus, llama, transformers_peer, vllm_server
from benchmarks.peers.base import Setup, Side, Unavailable
from isthmus.common.errors import ConfigError

SIDES: dict[str, Side] = {
    side.name: side
    for side in (
        *isthmus.SIDES, *vllm_server.SIDES, *llama.SIDES, *transformers_peer.SIDES,
    )
}  # fmt: skip
# Ids below are special tokens or bytes; from here on every id of the vocabulary is text.
FIRST_ORDINARY_TOKEN = 100


def side_result(side: Side, setup: Setup, load: Load, rounds: Sequence[int]) -> Result:
    """Starts and measures one side; what stands in the way becomes a sentence of the result."""
    readings: list[Round] = []
    problems: list[str] = []
    try:
        side.prepare(setup)
        for stage in ("alone", "loaded") if side.is_split else ("all",):
            more, skipped = stage_rounds(side, setup, load, stage, rounds)
            readings = merged(readings, more)
            problems += [skipped] if skipped else []
    except Unavailable as error:
        problems.append(str(error))
    return Result(
        name=side.name,
        title=side.title + (f" ({setup.peer_dtype})" if is_free_to_choose(side) else ""),
        rival=side.rival,
        bytes_per_weight=side.bytes_per_weight(setup),
        num_rounds=len(readings),
        readings=medians(readings) if readings else {},
        skipped="; ".join(problems),
    )


def is_free_to_choose(side: Side) -> bool:
    """Whether ``--peer-dtype`` decides the side's format."""
    return side.name in ("vllm", "transformers")


def stage_rounds(
    side: Side, setup: Setup, load: Load, stage: str, rounds: Sequence[int]
) -> tuple[list[Round], str]:
    with side.serve(setup, stage) as server:
        print(f"  {side.name}: ready after {server.start_s:.1f} s", flush=True)
        readings, skipped = measure_rounds(server, load, stage, rounds)
    start = {START: Reading(server.start_s, 0.0)}
    return [start | reading for reading in readings], skipped


def merged(first: list[Round], second: list[Round]) -> list[Round]:
    """Both stages of a round together; of what both have, the larger (memory, start).

    A round that only one of them lived through has the figures of that one.
    """
    together = []
    for one, other in itertools.zip_longest(first, second, fillvalue=None):
        both = (one or {}) | (other or {})
        for name in (MEMORY, START):
            found = [part[name] for part in (one, other) if part and name in part]
            if found:
                both[name] = max(found, key=lambda reading: reading.value or 0.0)
        together.append(both)
    return together


def plan(
    names: Sequence[str], rounds: int, *, interleave: bool
) -> Iterator[tuple[str, Sequence[int]]]:
    """Side by side with all its rounds, or round by round with all sides, started anew each."""
    if interleave:
        yield from ((name, (number,)) for number in range(rounds) for name in names)
    else:
        yield from ((name, range(rounds)) for name in names)


def joined(results: Sequence[Result]) -> Result:
    """Results of one side from several starts: the median over them all."""
    last = results[-1]
    whole = [result for result in results if result.readings]
    return Result(
        last.name, last.title, last.rival, last.bytes_per_weight,
        num_rounds=sum(result.num_rounds for result in results),
        readings=medians([result.readings for result in whole]),
        skipped=next((result.skipped for result in results if result.skipped), ""),
    )  # fmt: skip


def to_json(results: Mapping[str, Result]) -> dict[str, Any]:
    return {name: asdict(result) for name, result in results.items()}


def from_json(sides: Mapping[str, Any]) -> dict[str, Result]:
    return {
        name: Result(
            **{
                **side,
                "readings": {key: Reading(**value) for key, value in side["readings"].items()},
            }
        )
        for name, side in sides.items()
    }


def default_peer_dtype(features: object) -> str:
    """bf16 where the processor multiplies it, else the format that is the faster one for torch."""
    known = set(features) if isinstance(features, list) else set()
    return "bfloat16" if known & {"avx512_bf16", "amx_bf16"} else "float32"


def numbers(value: str) -> tuple[int, ...]:
    return tuple(int(item) for item in value.split(",") if item)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=SIDES, help="one side; repeatable")
    parser.add_argument("--peers", help="peers beside both of ours, by comma; default: all")
    parser.add_argument("--budget-s", type=float, default=60.0, help="longest time of one figure")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--lengths", type=numbers, default=tuple(TTFT_REQUESTS))
    parser.add_argument("--concurrencies", type=numbers, default=CONCURRENCIES)
    parser.add_argument("--interleave", action="store_true", help="start every side every round")
    parser.add_argument(
        "--peer-dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of vLLM and transformers; auto: what is faster for them on this processor",
    )
    parser.add_argument("--venvs", type=Path, default=OUT / "peers", help="where peers live")
    parser.add_argument("--no-setup", action="store_true", help="skip peers that are not set up")
    parser.add_argument("--ready-timeout-s", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=Path, help="limits measured before; default: now")
    parser.add_argument("--report-only", action="store_true", help="write the table and plot anew")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[str]:
    if args.only:
        return [name for name in SIDES if name in args.only]
    peers = args.peers.split(",") if args.peers is not None else list(SIDES)
    unknown = sorted(set(filter(None, peers)) - set(SIDES))
    if unknown:
        raise SystemExit(f"no side named {', '.join(unknown)}; there are {', '.join(SIDES)}")
    return [name for name, side in SIDES.items() if not side.rival or name in peers]


def limits_for(args: argparse.Namespace) -> Limits:
    if args.limit is None:
        print("measuring the machine's limits", flush=True)
        return measure_limits(args.threads)
    return Limits(**json.loads(args.limit.read_text())["limits"])


def write(state: dict[str, Any], model: Path) -> str:
    """The JSON, the table and the plot; returns the table."""
    (OUT / "engine.json").write_text(json.dumps(state, indent=1))
    limits, shape = Limits(**state["limits"]), read_shape(model)
    by_name = from_json(state["sides"])
    results = [by_name[name] for name in SIDES if name in by_name]
    bounds = {r.name: Bounds(shape, limits, r.bytes_per_weight) for r in results}
    table = markdown(results, bounds, limits, state["output_tokens"], state["machine"])
    (OUT / "engine.md").write_text(table, encoding="utf-8")
    try:
        plot(results, bounds, state["output_tokens"], OUT / "engine.png")
    except ConfigError as missing:
        table += f"\nNo plot: {missing.message}.\n"
    return table


def main() -> None:
    args = parse_arguments()
    model = export((OUT / "sample-bf16").resolve())
    saved = OUT / "engine.json"
    state: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() else {"sides": {}}
    if not args.report_only:
        machine = describe()
        dtype = args.peer_dtype
        if dtype == "auto":
            dtype = default_peer_dtype(machine["features"])
        limits = asdict(limits_for(args))
        state |= {"machine": machine, "limits": limits, "output_tokens": args.output_tokens}
        run(args, state, model, dtype)
    print(write(state, model))


def run(args: argparse.Namespace, state: dict[str, Any], model: Path, dtype: str) -> None:
    """Measures the chosen sides and saves after each, so that nothing measured is lost."""
    load = Load(
        output_tokens=args.output_tokens,
        budget_s=args.budget_s,
        lengths=args.lengths,
        concurrencies=args.concurrencies,
        vocab=read_shape(model).vocab - FIRST_ORDINARY_TOKEN,
    )
    found: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-", ignore_cleanup_errors=True) as folder:
        setup = Setup(
            model, args.venvs.resolve(), Path(folder), args.threads, dtype,
            may_install=not args.no_setup, ready_timeout_s=args.ready_timeout_s,
        )  # fmt: skip
        for name, rounds in plan(chosen(args), args.rounds, interleave=args.interleave):
            print(f"{name}, rounds {[number + 1 for number in rounds]}", flush=True)
            result = side_result(SIDES[name], setup, load, rounds)
            found.setdefault(name, []).append(result)
            state["sides"] |= to_json({name: joined(found[name])})
            (OUT / "engine.json").write_text(json.dumps(state, indent=1))


if __name__ == "__main__":
    main()
