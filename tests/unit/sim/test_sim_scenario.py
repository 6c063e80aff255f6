from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.common.errors import ConfigError
from isthmus.common.profile import InstanceProfile
from isthmus.sim import parse_scenario, read_scenario, run_scenario
from isthmus.sim.build import make_all_requests, make_calls, make_specs
from isthmus.workload import Call, repeat
from tests.support.sim_runs import make_scenario

SCENARIO = """
name: small
pools:
  - {role: prefill, count: 2, tp: 2}
  - {role: decode, count: 3}
workload: {trace: calls.jsonl, requests: 0, copies: 2}
classes:
  fast: {share: 3, ttft_ms: 500, tpot_ms: 50, strict: true}
  slow: {share: 1}
tenants: {a: 1, b: 1}
"""


def write_trace(path: Path, count: int = 20) -> None:
    rows = [
        {"timestamp": 100 * n, "input_length": 1_200, "output_length": 8, "hash_ids": [0, 1, 2 + n]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_scenario_is_read_with_its_files_beside_it(tmp_path: Path) -> None:
    write_trace(tmp_path / "calls.jsonl")
    (tmp_path / "small.yaml").write_text(SCENARIO, encoding="utf-8")
    scenario = read_scenario(tmp_path / "small.yaml")
    assert (scenario.num_instances, scenario.num_gpus) == (5, 7)
    names = [spec.instance_id for spec in make_specs(scenario)]
    assert names == ["p0", "p1", "d0", "d1", "d2"]
    report = run_scenario(scenario).report
    assert report.total.num_offered == 40
    assert set(report.classes) == {"fast", "slow"}
    assert set(report.tenants) == {"a", "b"}
    assert report.cached_share > 0.2, "the calls of one copy begin alike"


def test_limits_are_the_saved_profiles_unless_the_scenario_says_others(tmp_path: Path) -> None:
    saved = InstanceProfile(
        max_num_batched_tokens=300, max_num_seqs=7, max_model_len=900, num_blocks=50,
        block_size=32, kv_bytes_per_token=11_520,
    )  # fmt: skip
    (tmp_path / "saved.json").write_text(saved.to_json(), encoding="utf-8")
    pool = {"role": "mixed", "profile": {"kind": "isthmus", "file": "saved.json"}}
    tree = {"pools": [pool], "workload": {"rate": 1}}
    (spec,) = make_specs(parse_scenario(tree, tmp_path))
    assert (spec.max_num_batched_tokens, spec.max_num_seqs, spec.max_model_len) == (300, 7, 900)
    assert (spec.num_blocks, spec.block_size, spec.kv_token_bytes) == (50, 32, 11_520)
    tree["pools"] = [{**pool, "max_num_seqs": 9, "block_size": 16}]
    (spec,) = make_specs(parse_scenario(tree, tmp_path))
    assert (spec.max_num_batched_tokens, spec.max_num_seqs) == (300, 9)
    assert (spec.num_blocks, spec.block_size) == (100, 16), "of as many tokens"


def test_copies_of_a_trace_share_no_prefix_and_follow_each_other() -> None:
    calls = [Call(0, 0.0, 600, 1, (1, 2)), Call(1, 1.0, 600, 1, (1, 3))]
    both = repeat(calls, 2)
    assert [call.index for call in both] == [0, 1, 2, 3]
    assert [call.due_s for call in both] == [0.0, 1.0, 2.0, 3.0]
    assert not set(both[0].blocks) & set(both[2].blocks)
    assert both[2].blocks[0] == both[3].blocks[0]


def test_equal_blocks_of_a_trace_have_equal_hashes() -> None:
    scenario = make_scenario()
    calls = [Call(0, 0.0, 1_100, 1, (7, 8, 9)), Call(1, 1.0, 1_100, 1, (7, 8, 10))]
    first, second = make_all_requests(scenario, calls)
    assert len(first.hashes) == 1_100 // 16
    assert first.hashes[:64] == second.hashes[:64]
    assert not set(first.hashes[64:]) & set(second.hashes[64:])


def test_conversations_find_what_was_said_before() -> None:
    workload = {
        "rate": 1.0, "requests": 60, "turns": 4, "prompt": "600", "answer": "50", "think_s": 5,
    }  # fmt: skip
    report = run_scenario(make_scenario(workload=workload)).report
    assert report.total.num_offered == 60
    assert report.cached_share > 0.4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pools": [{"role": "prefill"}]}, "no decode or mixed"),
        ({"pools": []}, "pools"),
        ({"workload": {"requests": 5}}, "needs rate"),
        ({"colour": "blue"}, "colour"),
        ({"classes": {"x": {"ttft_ms": -1}}}, "greater than 0"),
        (
            {"pools": [{"role": "mixed", "profile": {"kind": "distserve"}}]},
            "file is for the other kinds",
        ),
    ],
)
def test_what_is_wrong_with_a_scenario_is_said(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scenario(**change)


def test_a_fault_needs_an_instance_that_is_there() -> None:
    faults = [{"kind": "kill", "instance": "d7", "at_s": 1}]
    with pytest.raises(ConfigError, match="no instance 'd7'"):
        run_scenario(make_scenario(faults=faults))


def test_blocks_must_divide_those_of_a_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "calls.jsonl")
    scenario = parse_scenario(
        {
            "pools": [{"role": "mixed", "block_size": 100}],
            "workload": {"trace": "calls.jsonl", "requests": 0},
        },
        tmp_path,
    )
    with pytest.raises(ConfigError, match="divide"):
        make_all_requests(scenario, make_calls(scenario))


def test_a_prompt_that_names_a_block_twice_is_refused() -> None:
    call = Call(7, 0.0, 1_200, 8, blocks=(3, 4, 3))
    with pytest.raises(ConfigError, match="call 7 names a block twice"):
        make_all_requests(make_scenario(), [call])


def test_a_seed_gives_the_same_report_twice() -> None:
    scenario = make_scenario(noise=0.1, cancel_share=0.2, patience_s=0.5, seed=3)
    first, second = (run_scenario(scenario).report.as_json() for _ in range(2))
    assert first == second
    other = run_scenario(scenario.model_copy(update={"seed": 4})).report.as_json()
    assert other["total"] != first["total"]
