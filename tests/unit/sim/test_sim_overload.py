"""Two classes of service beyond what a pair can do: the heavier one keeps its quantile."""

from __future__ import annotations

from collections import Counter

from isthmus.common.attainment import Verdict
from isthmus.sim import run_scenario
from isthmus.sim.build import make_calls
from tests.support.sim_runs import make_scenario

CAPACITY = 2.0  # calls/s of a pair with these steps
QUANTILE = 0.9
STEPS = {"prefill_base": 15.0, "prefill_token": 3.2, "prefill_pair": 0.0005,
         "decode_base": 25.0, "decode_seq": 2.3, "decode_context": 0.004}  # fmt: skip
TARGETS = {"ttft_ms": 1_200, "tpot_ms": 100, "quantile": QUANTILE}


def goodput_at(multiple: float, seeds: tuple[int, ...], noise: float = 0.1) -> tuple[float, float]:
    """Of the heavy class its attainment, of both together the good calls per second."""
    counts, goodput = Counter[bool](), 0.0
    for seed in seeds:
        scenario = make_scenario(
            seed=seed,
            pools=[
                {"role": role, "max_num_batched_tokens": 512, "profile": {"coefficients": STEPS}}
                for role in ("prefill", "decode")
            ],
            workload={"rate": multiple * CAPACITY, "requests": 400, "prompt": "64-192",
                      "answer": "16-32"},
            classes={
                "critical": {**TARGETS, "weight": 4.0, "strict": True, "share": 0.25},
                "batch": {**TARGETS, "share": 0.75},
            },
            noise=noise,
            dispatch_ms=5,
            transfer_setup_ms=10,
            router={"policy": "goodput"},
        )  # fmt: skip
        run = run_scenario(scenario, make_calls(scenario))
        goodput += run.report.total.goodput / len(seeds)
        counts.update(
            record.verdict is Verdict.GOOD
            for record in run.records
            if record.request.slo.class_name == "critical"
        )
    return counts[True] / counts.total(), goodput


def test_heavy_class_keeps_its_quantile_at_twice_the_load_and_goodput_does_not_collapse() -> None:
    seeds = 1, 2, 3
    loads = {multiple: goodput_at(multiple, seeds) for multiple in (1.0, 2.0, 3.0)}
    peak = max(goodput for _, goodput in loads.values())
    assert loads[1.0][0] >= QUANTILE
    assert loads[2.0][0] >= QUANTILE
    assert loads[2.0][1] >= 0.9 * peak
    assert loads[3.0][1] >= 0.9 * peak


def test_heavy_class_loses_little_where_no_step_takes_what_it_should() -> None:
    attainment, goodput = goodput_at(2.0, (1, 2, 3), noise=0.3)
    assert attainment >= QUANTILE - 0.1  # 0.76 when who may be late is refused at once
    assert goodput >= 2.2
