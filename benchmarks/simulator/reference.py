"""Our simulator against DistServe's: every row of a table that theirs made, and the best cluster.

Their disaggregated backend is one prefill and one decode instance, their co-located one a mixed
instance; both as ``Batching.PROMPTS_FIRST``. Their request makes one token more than its output
length (the prefill's), and its time per token is over the output length, so with one token more
their figure is our TPOT. KV moves in no time there.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.sim import Scenario, parse_scenario, run_scenario
from isthmus.sim.planner import Plan, Shape, make_plan
from isthmus.workload import Call

MODEL = "facebook/opt-13b"
TTFT_MS, TPOT_MS = 200.0, 100.0
MAX_DIFFERENCE = 5.0  # points of joint attainment


@dataclass(frozen=True, slots=True)
class Row:
    workload: str
    rate: float
    backend: str
    shape: Shape
    theirs: dict[str, float]
    ours: dict[str, float]

    @property
    def difference(self) -> float:
        return self.ours["joint_attain_pct"] - self.theirs["joint_attain_pct"]


def read_calls(file: Path) -> list[Call]:
    """Start times at 1 request/s, lengths; one token more (see above)."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [
        Call(
            index,
            float(row["start_s_at_1rps"]),
            int(row["prompt_tokens"]),
            int(row["output_tokens"]) + 1,
        )
        for index, row in enumerate(rows)
    ]


def scenario_for(shape: Shape, profile: Path, colocated: Path) -> Scenario:
    """``colocated``: the profile of the mixed instances."""
    pools = []
    for role, count, tp, file in (
        ("prefill", shape.prefills, shape.prefill_tp, profile),
        ("decode", shape.decodes, shape.decode_tp, profile),
        ("mixed", shape.mixed, shape.mixed_tp, colocated),
    ):
        pool: dict[str, Any] = {
            "role": role,
            "count": max(1, count),
            "tp": tp,
            "profile": {"kind": "distserve", "file": str(file), "model": MODEL},
            "batching": "prompts_first",
            "max_num_batched_tokens": 66_144,
            "max_num_seqs": 100_000,
            "num_blocks": 10**6,
            "link_gb_per_s": 1e9,
        }
        if count:
            pools.append(pool)
    return parse_scenario(
        {
            "name": str(shape),
            "pools": pools,
            "workload": {"rate": 1.0, "requests": 1},
            "classes": {"default": {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS}},
            "router": {"policy": "round_robin", "min_remote_tokens": 0},
            "dispatch_ms": 0.0,
            "transfer_setup_ms": 0.0,
            "report_interval_ms": 1_000.0,
        },
        Path(),
    )


def shape_of(row: dict[str, str]) -> Shape:
    prefill_tp, decode_tp = int(row["tp_prefill"]), int(row["tp_decode"])
    if row["backend"] == "distserve":
        return Shape(1, 1, prefill_tp=prefill_tp, decode_tp=decode_tp)
    return Shape(mixed=1, mixed_tp=prefill_tp)


def compare(
    reference: Path, workloads: dict[str, Path], profile: Path, colocated: Path
) -> Iterator[Row]:
    calls = {name: read_calls(file) for name, file in workloads.items()}
    with reference.open(encoding="utf-8", newline="") as lines:
        table = list(csv.DictReader(lines))
    for row in table:
        shape, rate = shape_of(row), float(row["rate_rps"])
        scenario = scenario_for(shape, profile, colocated)
        stretched = at_rate_of(calls[row["workload"]], rate)
        total = run_scenario(scenario, stretched).report.total
        names = ("ttft_attain_pct", "tpot_attain_pct", "joint_attain_pct", "ttft_p50_ms",
                 "ttft_p90_ms", "tpot_p50_ms", "tpot_p90_ms")  # fmt: skip
        figures = (
            100 * total.ttft_attainment, 100 * total.tpot_attainment, 100 * total.attainment,
            total.ttft.p50, total.ttft.p90, total.tpot.p50, total.tpot.p90,
        )  # fmt: skip
        yield Row(
            workload=row["workload"],
            rate=rate,
            backend=row["backend"],
            shape=shape,
            theirs={name: float(row[name]) for name in names},
            ours={n: math.nan if f is None else f for n, f in zip(names, figures, strict=True)},
        )


def at_rate_of(calls: list[Call], rate: float) -> list[Call]:
    """Start times are for 1 request/s: divided by the rate, whatever their mean came out as."""
    start = calls[0].due_s
    return [
        Call(c.index, (c.due_s - start) / rate, c.num_prompt_tokens, c.num_output_tokens)
        for c in calls
    ]


def plan(rows: list[Row], workload: str, calls_file: Path, profile: Path, colocated: Path) -> Plan:
    """The planner over the clusters of the table. Its rates are of arrivals; those of the table are
    of the file's nominal 1 request/s, times ``mean_rate`` of the calls."""
    tried = list(dict.fromkeys(row.shape for row in rows if row.workload == workload))
    pattern = scenario_for(Shape(1, 1, 1), profile, colocated)
    return make_plan(pattern, tried, calls=read_calls(calls_file), tolerance=0.02, margin=0.9)


def their_goodput(rows: list[Row], workload: str, shape: Shape) -> float:
    """By their table: the rate at which joint attainment crosses 90 %, between two rows."""
    points = sorted(
        (row.rate, row.theirs["joint_attain_pct"])
        for row in rows
        if row.workload == workload and row.shape == shape
    )
    best = 0.0
    for (low, before), (high, after) in zip([(0.0, 100.0), *points], points, strict=False):
        if before >= 90.0 > after:
            return low + (high - low) * (before - 90.0) / (before - after)
        best = high
    return best
