"""Small simulated clusters: what the goodput policy is for, beside one that binds at once."""

from __future__ import annotations

import random
from pathlib import Path

from isthmus.sim import Run, Scenario, parse_scenario, run_scenario, with_policy
from isthmus.workload import Call

TTFT_MS, TPOT_MS = 3_000.0, 60.0


def scenario(prefills: int, decodes: int, **changes: object) -> Scenario:
    """A prompt of 1,000 tokens takes 205 ms, an answer alone 22 ms a token."""
    coefficients = {
        "prefill_base": 5.0, "prefill_token": 0.2, "prefill_pair": 0.0,
        "decode_base": 21.0, "decode_seq": 1.0, "decode_context": 0.0,
    }  # fmt: skip
    pools = [
        {
            "role": role,
            "count": count,
            "num_blocks": 20_000,
            "profile": {"kind": "coefficients", "coefficients": coefficients},
            "max_num_batched_tokens": 2_048 if role == "prefill" else 256,
        }
        for role, count in (("prefill", prefills), ("decode", decodes))
    ]
    tree = {
        "pools": pools,
        "workload": {"rate": 1.0, "requests": 1},
        "classes": {"default": {"ttft_ms": TTFT_MS, "tpot_ms": TPOT_MS}},
    }
    return parse_scenario(tree | changes, Path())


def run(policy: str, cluster: Scenario, calls: list[Call]) -> Run:
    return run_scenario(with_policy(cluster, policy), calls)


def bursts(rng: random.Random, num_bursts: int, size: int, gap_s: float) -> list[Call]:
    """Prompts of which a few are long, half of the answers short."""
    calls: list[Call] = []
    for burst in range(num_bursts):
        for _ in range(size):
            prompt = rng.choice([200, 500, 1_000, 1_000, 2_000, 6_000])
            due_s = burst * gap_s + rng.random()
            calls.append(Call(0, due_s, prompt, rng.choice([8, 12, 30, 60])))
    calls.sort(key=lambda call: call.due_s)
    return [Call(n, c.due_s, c.num_prompt_tokens, c.num_output_tokens) for n, c in enumerate(calls)]


def test_a_burst_is_taken_by_both_pools_and_its_longest_prompts_are_given_up() -> None:
    cluster, calls = scenario(4, 4), bursts(random.Random(1), 6, 80, 12.0)
    found = {name: run(name, cluster, calls) for name in ("goodput", "least_predicted_load")}
    mine, other = (found[name].report.total for name in ("goodput", "least_predicted_load"))
    assert mine.attainment >= other.attainment + 0.1
    assert mine.tpot_attainment >= 0.96
    missed = [r.request.num_prompt for r in found["goodput"].records if not r.is_good]
    assert sum(missed) / len(missed) > 2 * sum(c.num_prompt_tokens for c in calls) / len(calls)


def test_prompts_that_cannot_be_in_time_leave_workers_for_those_that_can() -> None:
    rng, calls = random.Random(2), []
    for number in range(400):
        is_endless = number % 20 == 7  # 12 s of work, where the target is 3 s
        calls.append(Call(number, number / 16, 60_000 if is_endless else 600, rng.choice([20, 60])))
    found = run("goodput", scenario(4, 4), calls)
    in_time = [r for r in found.records if r.request.num_prompt == 600]
    assert sum(record.is_good for record in in_time) >= 0.98 * len(in_time)
    late = [r for r in found.records if r.request.num_prompt != 600]
    assert all(record.end_ns is not None and record.num_tokens for record in late)


def test_short_prompts_without_a_tpot_target_are_served_no_worse_than_by_binding_at_once() -> None:
    rng = random.Random(3)
    cluster = scenario(3, 3, classes={"default": {"ttft_ms": 600.0}})
    calls, due_s = [], 0.0
    for number in range(600):
        due_s += rng.expovariate(50)
        calls.append(Call(number, due_s, rng.choice([40, 80, 200]), rng.choice([10, 40])))
    found = {
        name: run(name, cluster, calls).report.total.attainment
        for name in ("goodput", "least_predicted_load")
    }
    assert found["goodput"] >= found["least_predicted_load"] - 0.005


def test_a_pair_computes_more_prompts_than_its_prefill_instance_could() -> None:
    """Prompts of two seconds: beside a decode none is short enough, between two of them it is."""
    rng = random.Random(4)
    cluster = scenario(1, 1, classes={"default": {"ttft_ms": 6_000.0, "tpot_ms": 66.0}})
    calls, due_s = [], 0.0
    for number in range(100):
        due_s += rng.expovariate(0.5)
        calls.append(Call(number, due_s, rng.randint(8_000, 12_000), rng.randint(8, 24)))
    found = run("goodput", cluster, calls).report
    assert found.total.attainment >= 0.78  # with hardly a local prefill it is 0.71
    assert 0.1 <= found.local_share <= 0.5
