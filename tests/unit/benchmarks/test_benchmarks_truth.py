"""What live measurements are turned into: means, scenarios of profiles, shares of a peak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overload import BATCH, CRITICAL, Load, by_class, class_flags, table
from benchmarks.scrape import Scrape, mean_stages
from benchmarks.sim_truth.live import LiveRun, Look
from benchmarks.sim_truth.report import Pair
from benchmarks.sim_truth.simulated import Setting, save_profiles, scenario_of, simulate
from isthmus.common.cluster import LatencyModel, Role, StepTotals
from isthmus.common.profile import InstanceProfile
from isthmus.loadgen import Record, Status, Targets, summarise
from isthmus.workload import Call

TARGETS = Targets(ttft_ms=1_000.0, tpot_ms=100.0)


def done(index: int, slo_class: str = "", ttft_s: float = 0.5) -> Record:
    call = Call(index, float(index), 100, 11, slo_class=slo_class)
    first_s = index + ttft_s
    return Record(
        call, sent_s=index, first_s=first_s, second_s=first_s + 0.05, last_s=first_s + 0.5,
        num_tokens=11, num_prompt_tokens=100, status=Status.DONE, http_status=200,
    )  # fmt: skip


def test_means_of_stages_are_of_what_came_between_two_looks() -> None:
    text = """# TYPE isthmus_stage_seconds histogram
isthmus_stage_seconds_bucket{stage="queue",le="+Inf"} %d
isthmus_stage_seconds_count{stage="queue"} %d
isthmus_stage_seconds_sum{stage="queue"} %f
# TYPE isthmus_prediction_coverage gauge
isthmus_prediction_coverage{kind="ttft",quantile="0.9"} 0.85
"""
    before, after = Scrape.parsed(text % (2, 2, 0.5)), Scrape.parsed(text % (6, 6, 1.5))
    assert mean_stages(before, after) == {"queue": pytest.approx(250.0)}
    assert mean_stages(after, after) == {}
    found = after.value("isthmus_prediction_coverage", quantile="0.9", kind="ttft")
    assert found == 0.85
    assert after.value("isthmus_prediction_coverage", kind="tpot") is None


def test_a_live_run_is_read_back_as_it_was_saved() -> None:
    records = [done(0), Record(Call(1, 1.0, 5, 5))]
    looks = [Look("p", 0.5, StepTotals(decode_steps=3))]
    run = LiveRun(1.0, records, {"queue": 1.0}, {"p": InstanceProfile()}, looks, 0.1)
    assert LiveRun.from_json(json.loads(json.dumps(run.as_json()))) == run


def test_the_simulation_has_the_instances_that_were_profiled(tmp_path: Path) -> None:
    latency = LatencyModel(prefill_base=0, prefill_token=4.0, decode_base=30, decode_seq=1)
    profiles = {
        name: InstanceProfile(role=role, latency=latency, max_num_batched_tokens=64)
        for name, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE))
    }
    files = save_profiles(profiles, tmp_path)
    scenario = scenario_of(profiles, files, Setting("goodput", TARGETS, seed=1))
    assert {pool.role for pool in scenario.pools} == {Role.PREFILL, Role.DECODE}
    records = [done(index) for index in range(4)]
    report = simulate(scenario, [record.call for record in records])
    assert report.total.num_offered == 4
    assert report.total.ttft.p50 == pytest.approx(400, rel=0.05)
    pair = Pair(1.0, summarise(records, TARGETS), report, 0.0)
    assert pair.error == pytest.approx(0.0, abs=1e-9)


def test_each_class_is_judged_alone_and_the_goodput_beside_the_best() -> None:
    records = [done(0, CRITICAL), done(1, BATCH), done(2, CRITICAL, ttft_s=3), done(3, BATCH)]
    classes = by_class(records, TARGETS)
    assert (classes[CRITICAL].attainment, classes[BATCH].attainment) == (0.5, 1.0)
    half = [done(index, CRITICAL, ttft_s=0.5 + 9 * (index % 2)) for index in range(4)]
    loads = [
        Load(1.0, summarise([done(i) for i in range(4)], TARGETS), classes, 0.0),
        Load(2.0, summarise(half, TARGETS), by_class(half, TARGETS), 0.0),
    ]
    first, second = table(loads).splitlines()[2:]
    assert first.split("|")[4].strip() == "100%"
    assert [cell.strip() for cell in second.split("|")[4:7]] == ["50%", "50.0%", "–"]


def test_both_classes_are_told_to_the_cluster() -> None:
    flags = class_flags(TARGETS, 0.9)
    assert "slo.classes.critical.mode=strict" in flags
    assert "slo.classes.batch.mode=best_effort" in flags
    assert flags.count("--set") == 10
