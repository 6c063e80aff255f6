from __future__ import annotations

import pytest

from isthmus.common.errors import ConfigError
from isthmus.sim import Budget, make_plan, search_goodput
from isthmus.sim.planner import Shape, shapes, with_shape
from tests.support.sim_runs import make_scenario

# One long prompt in a while, few tokens: what limits the rate is prefill alone, 105 ms a prompt.
PROMPTS = {
    "rate": 4.0,
    "requests": 150,
    "cv": 0.0,
    "prompt": "1000",
    "answer": "1",
    "max_output": 1,
}
FAST = {"coefficients": {"prefill_base": 5, "prefill_token": 0.1}}


def prompts(**changes: object) -> dict[str, object]:
    return {
        "pools": [{"role": "mixed", "profile": FAST, "max_num_batched_tokens": 1_000}],
        "workload": PROMPTS,
        "classes": {"default": {"ttft_ms": 150.0, "tpot_ms": 100.0}},
        "dispatch_ms": 0.0,
    } | changes


def test_the_search_finds_the_rate_of_a_clock_that_fills_the_server() -> None:
    found = search_goodput(make_scenario(**prompts()), tolerance=0.02)
    # One request each 105 ms; a little more is possible, as the run ends before the queue is long.
    assert found.rate == pytest.approx(1e3 / 105, rel=0.03)
    assert found.best is not None
    assert found.best.total.attainment >= 0.9
    assert not found.is_capped


def test_a_target_that_cannot_be_met_gives_no_rate() -> None:
    classes = {"default": {"ttft_ms": 50.0}}
    found = search_goodput(make_scenario(**prompts(classes=classes)))
    assert (found.rate, found.best) == (0.0, None)


def test_fewer_requests_do_not_make_a_cluster_faster() -> None:
    """A burst of twenty ends within this target, however fast it comes."""
    classes = {"default": {"ttft_ms": 3_000.0}}
    rates = []
    for count in (20, 100, 1_000):
        workload = {**PROMPTS, "requests": count, "cv": 1.0}
        rates.append(
            search_goodput(make_scenario(**prompts(classes=classes, workload=workload))).rate
        )
    assert max(rates) <= 1e3 / 105 * 1.3
    assert max(rates[:2]) <= rates[2] * 1.2


def test_a_search_or_plan_without_a_limit_of_waiting_is_refused() -> None:
    scenario = make_scenario(**prompts(classes={"default": {"tpot_ms": 100.0}}))
    for search in (search_goodput, lambda it: make_plan(it, [Shape(mixed=1)])):
        with pytest.raises(ConfigError, match="needs a TTFT target"):
            search(scenario)


def test_shapes_nearer_than_the_tolerance_are_ties() -> None:
    """One instance and two of the same serve the same per GPU."""
    plan = make_plan(make_scenario(**prompts()), [Shape(mixed=1), Shape(mixed=2)], tolerance=0.1)
    assert len(plan.ties) == 1
    assert plan.as_json()["ties"] == [str(plan.candidates[1].shape)]


def test_all_shapes_that_fit_are_tried() -> None:
    found = list(shapes(Budget(3, (1, 2))))
    assert len(found) == len(set(found))
    assert all(shape.num_gpus <= 3 for shape in found)
    assert Shape(1, 2) in found
    assert Shape(1, 1, prefill_tp=2) in found
    assert Shape(mixed=1, mixed_tp=2) in found
    assert all(shape.num_gpus == 3 for shape in shapes(Budget(3, (1, 2), must_fill=True)))
    assert not any(shape.mixed for shape in shapes(Budget(3, with_mixed=False)))


def test_mixed_instances_win_when_there_is_nothing_to_decode() -> None:
    """Two that compute prompts. The pair's decode instance computes some too, but not as freely."""
    plan = make_plan(
        make_scenario(**prompts()), list(shapes(Budget(2))), tolerance=0.05, margin=0.9
    )
    assert plan.best.shape.decodes == 0
    pair = next(item for item in plan.candidates if item.shape.decodes)
    assert plan.best.goodput_per_gpu == pytest.approx(1e3 / 105, rel=0.1)
    assert pair.goodput_per_gpu < plan.best.goodput_per_gpu
    assert "TTFT" in pair.limit


def test_a_pair_wins_when_chunks_would_make_decodes_late() -> None:
    """Steps with a chunk take longer than the TPOT target, those without are well within it."""
    scenario = make_scenario(
        pools=[
            {
                "role": "mixed",
                "profile": {"coefficients": {"prefill_base": 50, "prefill_token": 0.5}},
                "max_num_batched_tokens": 1_000,
            }
        ],
        workload={"rate": 0.5, "requests": 60, "prompt": "1000", "answer": "20"},
        classes={"default": {"ttft_ms": 3_000.0, "tpot_ms": 30.0}},
        router={"policy": "round_robin", "min_remote_tokens": 0},
    )
    plan = make_plan(scenario, list(shapes(Budget(2))), tolerance=0.4, margin=0.9)
    assert str(plan.best.shape) == "1 prefill × TP 1 + 1 decode × TP 1"


def test_a_shape_that_does_not_fit_is_left_out_with_its_reason() -> None:
    scenario = make_scenario(
        pools=[{"role": "mixed", "profile": {**FAST, "model": "llama2-70b"}}],
        workload=PROMPTS,
        classes={"default": {"ttft_ms": 150.0}},
    )
    with pytest.raises(ConfigError, match="does not fit"):
        make_plan(scenario, [Shape(mixed=1)])


def test_a_role_without_a_pool_takes_another_for_its_pattern() -> None:
    shaped = with_shape(make_scenario(**prompts()), Shape(2, 3))
    assert [(p.role.value, p.count) for p in shaped.pools] == [("prefill", 2), ("decode", 3)]
    assert shaped.pools[0].max_num_batched_tokens == 1_000
