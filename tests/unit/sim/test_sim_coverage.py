"""Do predicted quantiles hold, and again after an instance has become half as fast?"""

from __future__ import annotations

from collections import Counter

import pytest

from isthmus.router.quantiles import Kind
from isthmus.sim.build import make_all_requests, make_calls, make_cluster
from isthmus.sim.flight import START_NS
from tests.support.sim_runs import MS, make_scenario

QUANTILE = 0.9
TOLERANCE = 0.05
RATE = 1.5  # of which the slowed instance still does all
CHANGE_MS = 200_000
KINDS = (Kind.TTFT, Kind.TPOT)
STEPS = {"prefill_base": 15.0, "prefill_token": 5.0, "prefill_pair": 0.001,
         "decode_base": 45.0, "decode_seq": 3.0, "decode_context": 0.003}  # fmt: skip


def coverages(slowed: str, seed: int) -> list[dict[Kind, float]]:
    """Of a pair on virtual time with steps that scatter by a quarter: as the metric tells it when
    ``slowed`` becomes half as fast and a minute later, and of what ended in the last half of that
    minute alone."""
    scenario = make_scenario(
        seed=seed,
        pools=[
            {"role": role, "max_num_batched_tokens": 512, "profile": {"coefficients": STEPS}}
            for role in ("prefill", "decode")
        ],
        workload={"rate": RATE, "requests": 460, "prompt": "33-48", "answer": "6-10"},
        classes={"default": {"ttft_ms": 3_000, "tpot_ms": 400}},
        noise=0.25,
        faults=[{"kind": "slow", "instance": slowed, "at_s": CHANGE_MS / 1e3, "factor": 2}],
        router={"policy": "goodput"},
    )
    cluster = make_cluster(scenario, make_all_requests(scenario, make_calls(scenario)))
    table = cluster.router.knowledge.residuals
    looks: list[dict[Kind, float]] = []
    recent, hits, observe = Counter[Kind](), Counter[Kind](), table.observe

    def count(kind: Kind, *measured: object) -> bool:
        is_hit: bool = observe(kind, *measured)  # type: ignore[arg-type]
        age_ms = (cluster.queue.now_ns - START_NS) / MS - CHANGE_MS
        if 30_000 <= age_ms <= 60_000:
            recent[kind] += 1
            hits[kind] += is_hit
        return is_hit

    def look(_: object) -> None:
        looks.append({kind: table.coverage(kind, QUANTILE)[0] for kind in KINDS})

    table.observe = count  # type: ignore[method-assign, assignment]
    for age_ms in (0, 60_000):
        cluster.queue.at(START_NS + (CHANGE_MS + age_ms) * MS, look, None)
    cluster.run()
    looks.append({kind: hits[kind] / recent[kind] for kind in KINDS})
    return looks


@pytest.mark.parametrize("slowed", ["p0", "d0"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_quantiles_hold_and_again_a_minute_after_an_instance_lost_half_its_speed(
    slowed: str, seed: int
) -> None:
    before, after, recent = coverages(slowed, seed)
    for kind in KINDS:
        assert abs(before[kind] - QUANTILE) <= TOLERANCE
        assert abs(after[kind] - QUANTILE) <= TOLERANCE
        # Some thirty of them: too few for the same bounds.
        assert recent[kind] >= QUANTILE - 2 * TOLERANCE
