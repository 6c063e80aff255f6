"""Do predicted quantiles hold, and again after an instance has become half as fast?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from isthmus.router.quantiles import Kind, Promise
from isthmus.sim.build import make_all_requests, make_calls, make_cluster
from isthmus.sim.flight import START_NS
from tests.support.sim_runs import MS, make_scenario

QUANTILE = 0.9
TOLERANCE = 0.05
KINDS = (Kind.TTFT, Kind.TPOT)
STEPS = {"prefill_base": 15.0, "prefill_token": 5.0, "prefill_pair": 0.001,
         "decode_base": 45.0, "decode_seq": 3.0, "decode_context": 0.003}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """``rate``: of which the slowed instance still does all."""

    rate: float
    answer: str
    change_ms: int

    @property
    def num_requests(self) -> int:
        return round(1.18 * self.rate * (self.change_ms / 1e3 + 60))  # by chance some come early


SHORT, LONG = Load(1.5, "6-10", 200_000), Load(0.8, "60-120", 375_000)


@dataclass(slots=True)
class Seen:
    """As the metrics tell it at the change and a minute later, and the share of promises kept of
    what ended in the last half of that minute alone."""

    coverage: list[dict[Kind, float]]
    kept: list[dict[Kind, float]]
    recent: dict[Kind, float]


def watch(slowed: str, load: Load, seed: int) -> Seen:
    """A pair on virtual time with steps that scatter by a quarter, of which ``slowed`` becomes half
    as fast."""
    scenario = make_scenario(
        seed=seed,
        pools=[
            {"role": role, "max_num_batched_tokens": 512, "profile": {"coefficients": STEPS}}
            for role in ("prefill", "decode")
        ],
        workload={"rate": load.rate, "requests": load.num_requests, "prompt": "33-48",
                  "answer": load.answer},
        classes={"default": {"ttft_ms": 3_000, "tpot_ms": 400}},
        noise=0.25,
        faults=[{"kind": "slow", "instance": slowed, "at_s": load.change_ms / 1e3, "factor": 2}],
        router={"policy": "goodput"},
    )  # fmt: skip
    cluster = make_cluster(scenario, make_all_requests(scenario, make_calls(scenario)))
    table = cluster.router.knowledge.residuals
    seen, observe = Seen([], [], {}), table.observe
    recent, num_kept = Counter[Kind](), Counter[Kind]()

    def count(promise: Promise, measured_ms: float, now_ns: int, change: float = 1.0) -> float:
        age_ms = (cluster.queue.now_ns - START_NS) / MS - load.change_ms
        if 30_000 <= age_ms <= 60_000:
            recent[promise.kind] += 1
            num_kept[promise.kind] += measured_ms <= promise.promised_ms
        return observe(promise, measured_ms, now_ns, change)

    def look(_: object) -> None:
        seen.coverage.append({kind: table.coverage(kind, QUANTILE)[0] for kind in KINDS})
        seen.kept.append({kind: table.kept(kind, QUANTILE)[0] for kind in KINDS})

    table.observe = count  # type: ignore[method-assign]
    for age_ms in (0, 60_000):
        cluster.queue.at(START_NS + (load.change_ms + age_ms) * MS, look, None)
    cluster.run()
    seen.recent = {kind: num_kept[kind] / recent[kind] for kind in KINDS}
    return seen


@pytest.mark.parametrize(
    ("slowed", "load"), [("p0", SHORT), ("d0", SHORT), ("d0", LONG)], ids=["p0", "d0", "d0-long"]
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_quantiles_hold_and_again_a_minute_after_an_instance_lost_half_its_speed(
    slowed: str, load: Load, seed: int
) -> None:
    seen = watch(slowed, load, seed)
    for kind in KINDS:
        for coverage in seen.coverage:
            assert abs(coverage[kind] - QUANTILE) <= TOLERANCE
        # Some thirty to seventy of them: too few for the same bounds.
        assert seen.recent[kind] >= QUANTILE - 2.5 * TOLERANCE


def test_promises_that_a_slow_down_broke_are_told_of_beside_the_coverage() -> None:
    seen = watch("d0", LONG, 1)
    assert seen.kept[0] == pytest.approx(seen.coverage[0], abs=0.01)  # nothing has changed yet
    assert seen.kept[1][Kind.TPOT] <= seen.coverage[1][Kind.TPOT] - TOLERANCE / 2
