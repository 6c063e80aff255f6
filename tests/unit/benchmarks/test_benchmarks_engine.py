"""What the comparison asks of a side, keeps of its rounds and prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.engine import __main__ as command
from benchmarks.engine.bounds import Bounds, ModelShape
from benchmarks.engine.measure import (
    MEMORY,
    RATE,
    START,
    TPOT,
    Load,
    Reading,
    combine,
    measure_rounds,
    parts,
)
from benchmarks.engine.report import Result, markdown, ratio, share_of_limit
from benchmarks.idle import usages
from benchmarks.limit import Limits
from benchmarks.load import Figures, TooSlow
from benchmarks.peers.base import Server, Setup, Unavailable, free_port, started
from benchmarks.run import NAMES, summary

LOAD = Load(128, 60.0, (128, 512), (1, 4, 16), 49_000)
LIMITS = Limits(2, 1e10, 1e10, 1e11, 1e11, {}, 0.0)
SHAPE = ModelShape(576, 1536, 30, 9, 3, 64, 49152)
BOUNDS = Bounds(SHAPE, LIMITS, 2.0)


def names(stage: str) -> list[str]:
    return [name for part in parts(LOAD, stage) for name in part.figures]


def result(name: str, rival: str, **values: float) -> Result:
    readings = {key: Reading(value, 0.25) for key, value in values.items()}
    return Result(name, name.title(), rival, 2.0, 3, readings)


def test_both_stages_together_measure_each_figure_once() -> None:
    assert names("alone") == ["ttft_ms_128", "ttft_ms_512", TPOT, "tokens_per_s_1"]
    assert names("loaded") == ["tokens_per_s_4", "tokens_per_s_16"]
    assert sorted(names("alone") + names("loaded")) == sorted(names("all"))


def test_rounds_become_a_median_that_remembers_what_was_cut() -> None:
    rounds = [Reading(3.0, 0.1), Reading(1.0, 0.3, is_cut=True), Reading(2.0, 0.2, num_errors=1)]
    assert combine(rounds) == Reading(2.0, 0.2, is_cut=True, num_errors=1)


def test_rounds_without_a_value_do_not_become_a_figure() -> None:
    missing = Reading(None, 0.1, is_cut=True, note="no token within 5 s")
    assert combine([missing, missing]).value is None
    assert combine([missing, Reading(4.0, 0.1)]).value == 4.0


def test_stages_of_one_round_are_put_together_with_the_larger_memory() -> None:
    start = {START: Reading(1.0, 0.0)}
    alone = [{TPOT: Reading(5.0, 0.0), MEMORY: Reading(100.0, 0.0)} | start] * 2
    loaded = [{RATE.format(4): Reading(9.0, 0.0), MEMORY: Reading(300.0, 0.0)} | start]
    both, single = command.merged(alone, loaded)
    assert both[MEMORY].value == 300.0
    assert {TPOT, RATE.format(4)} <= set(both)
    assert single == alone[1]


def test_sides_run_one_after_the_other_or_in_turns() -> None:
    assert list(command.plan(["a", "b"], 2, interleave=False)) == [("a", range(2)), ("b", range(2))]
    turns = [(name, tuple(rounds)) for name, rounds in command.plan(["a", "b"], 2, interleave=True)]
    assert turns == [("a", (0,)), ("b", (0,)), ("a", (1,)), ("b", (1,))]


def test_results_survive_their_file() -> None:
    results = {"a": result("a", "", tpot_ms_1=5.0), "b": result("b", "a")}
    assert command.from_json(json.loads(json.dumps(command.to_json(results)))) == results


def test_peers_get_the_format_their_processor_multiplies() -> None:
    assert command.default_peer_dtype(["avx2"]) == "float32"
    assert command.default_peer_dtype(["avx2", "avx512_bf16"]) == "bfloat16"


def test_shares_are_of_the_limit_in_both_directions() -> None:
    step_ms = 1e3 * BOUNDS.decode_step_s(1, 192)
    assert share_of_limit(TPOT, Reading(2 * step_ms, 0), BOUNDS, 128) == pytest.approx(0.5)
    rate = BOUNDS.tokens_per_s(4, 128, 128)
    share = share_of_limit(RATE.format(4), Reading(rate / 4, 0), BOUNDS, 128)
    assert share == pytest.approx(0.25)
    assert share_of_limit(MEMORY, Reading(100.0, 0), BOUNDS, 128) is None


def test_a_ratio_needs_both_sides() -> None:
    assert ratio(Reading(1.0, 0), Reading(4.0, 0)) == 0.25
    assert ratio(Reading(1.0, 0), None) is None
    assert ratio(Reading(1.0, 0), Reading(None, 0)) is None


def test_the_table_compares_each_peer_with_its_rival_and_says_who_is_missing() -> None:
    slow = Result("vllm", "vLLM", "isthmus", 4.0, 1, {TPOT: Reading(40.0, 0.1, is_cut=True)})
    gone = Result("llama", "llama.cpp", "isthmus", 2.0, 0, {}, "it could not be built")
    shown = [result("isthmus", "", tpot_ms_1=10.0, tokens_per_s_4=90.0), slow, gone]
    table = markdown(shown, {r.name: BOUNDS for r in shown}, LIMITS, 128, {"cpu": "some"})
    assert "| TPOT, 1 request (ms) | 10 | 40 (cut) |" in table
    assert "| figure | Isthmus / vLLM |" in table
    assert "| TPOT, 1 request (ms) | 0.25× |" in table
    assert "| output tokens/s, 4 at once | 90 | – |" in table
    assert "llama.cpp: it could not be built." in table
    assert "| TPOT, 1 request (ms) | 25% | 10% |" in table


@dataclass(frozen=True)
class Missing:
    name: str = "missing"
    title: str = "Missing"
    rival: str = ""
    is_split: bool = False

    def bytes_per_weight(self, setup: Setup) -> float:
        return 2.0

    def prepare(self, setup: Setup) -> None:
        raise Unavailable("there is no compiler")

    @contextmanager
    def serve(self, setup: Setup, stage: str) -> Iterator[Server]:
        raise AssertionError("it was not prepared")
        yield


def test_a_side_that_cannot_be_set_up_is_skipped_with_its_reason(tmp_path: Path) -> None:
    setup = Setup(tmp_path, tmp_path, tmp_path, 1, "float32", True, 1.0)
    found = command.side_result(Missing(), setup, LOAD, (0,))
    assert (found.readings, found.skipped) == ({}, "there is no compiler")


def test_a_server_that_is_gone_ends_its_rounds_with_a_reason() -> None:
    # Port 1 needs privileges nobody gives a test: nothing listens there.
    rounds, reason = measure_rounds(Server("http://127.0.0.1:1", "m", 1, 0.0), LOAD, "all", (0,))
    assert rounds == []
    assert "stopped answering" in reason


@pytest.mark.parametrize(
    ("fails_after", "expected"), [(0, []), (2, ["ttft_ms_128", MEMORY])], ids=["at once", "later"]
)
def test_a_server_that_is_stuck_keeps_what_it_has_shown(
    monkeypatch: pytest.MonkeyPatch, fails_after: int, expected: list[str]
) -> None:
    calls: list[str] = []

    async def run_load(url: str, model: str, **_options: object) -> Figures:
        calls.append(url)
        if len(calls) > fails_after:
            raise TooSlow("no token within 60 s")
        return Figures(5.0, 1.0, 2.0, 0, is_cut=len(calls) == fails_after)

    monkeypatch.setattr("benchmarks.engine.measure.run_load", run_load)
    rounds, reason = measure_rounds(Server("u", "m", 1, 0.0), LOAD, "all", (0, 1))
    assert [name for readings in rounds for name in readings] == expected
    assert "no answer to a prompt of 8 tokens" in reason


def test_idle_processes_are_listed_by_use() -> None:
    before = {1: ("a", 1.0, 10), 2: ("b", 2.0, 20), 3: ("ended", 0.0, 0)}
    after = {1: ("a", 1.5, 30), 2: ("b", 4.0, 20), 4: ("new", 9.0, 0)}
    first, second = usages(before, after, 10.0)
    assert (first.name, first.share, first.voluntary_switches_per_s) == ("b", 0.2, 0.0)
    assert (second.name, second.share, second.voluntary_switches_per_s) == ("a", 0.05, 2.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_says_in_one_line_what_it_measures(name: str) -> None:
    assert len(summary(name)) > 20


def test_a_peer_whose_server_ends_is_unavailable_with_its_last_words(tmp_path: Path) -> None:
    setup = Setup(tmp_path, tmp_path, tmp_path, 2, "float32", True, 30.0)
    program = "import os; print('threads', os.environ['OMP_NUM_THREADS']); raise SystemExit(3)"
    command = [sys.executable, "-c", program]
    with (
        pytest.raises(Unavailable, match=r"(?s)ended with code 3.*ends with: threads 2"),
        started("peer", command, "m", free_port(), setup),
    ):
        pass
