from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from benchmarks.simulator.__main__ import parsed
from benchmarks.simulator.scale import Load
from benchmarks.simulator.sheet import as_markdown
from benchmarks.simulator.table import (
    KINDS,
    STEP,
    Cell,
    Known,
    Point,
    Runs,
    calls_of,
    cells,
    fill,
    known,
    on_grid,
    search,
)

CELL = Cell("azure", "a100", 64, "goodput", 0)


def point(cell: Cell, rate: float, attainment: float) -> Point:
    return Point(cell, rate, 10, attainment, attainment, 1.0, 60.0, 1.0)


@pytest.mark.parametrize("limit", [0.5, 4.0, 52.0, 70.0, 71.0, 300.0])
def test_the_search_ends_between_two_rates_of_the_grid(limit: float) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = search(holds, 70.0)
    if limit < 1.0:
        assert found is None
    else:
        assert found is not None
        assert found <= limit < found * (STEP + 0.01)
    assert len(tried) == len(set(tried)) <= 12
    points = [point(CELL, rate, 0.95 if rate <= limit else 0.85) for rate in sorted(tried)]
    said = known(points)
    assert (said.is_found, said.low) == (found is not None, found or 0.0)
    assert found is not None or said.high == min(tried)


def test_a_search_that_was_interrupted_says_so(tmp_path: Path) -> None:
    rate, next_rate, far = on_grid(10), on_grid(11), on_grid(14)
    good, bad = point(CELL, rate, 0.95), point(CELL, far, 0.5)
    assert not known([]).is_found
    assert known([good]) == Known(rate, inf)
    assert known([good, bad]) == Known(rate, far)
    assert not known([good, bad]).is_found
    assert known([good, point(CELL, next_rate, 0.5)]).is_found
    other = replace(CELL, policy="round_robin")
    runs = Runs(tmp_path)
    for made in (good, bad, point(other, on_grid(2), 0.95), point(other, on_grid(5), 0.8)):
        runs.get(made.cell, made.rate, lambda made=made: made)
    line = as_markdown(runs, ["goodput", "round_robin"]).splitlines()[2]
    # Searched to no end: from the one's lowest rate to below the other's highest are six steps.
    assert line.endswith(f"≥ {rate:.3g}/s, < {far:.3g}/s | ≥ 1.14/s, < 1.4/s | ≥ 1.51 |")


def test_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    num_made = 0

    def make() -> Point:
        nonlocal num_made
        num_made += 1
        return point(CELL, 50.0, 0.9)

    first = Runs(tmp_path).get(CELL, 50.0, make)
    again = Runs(tmp_path)
    assert again.get(CELL, 50.0, make) == first
    assert (num_made, again.of(CELL), again.cells()) == (1, [first], [CELL])


def test_small_clusters_come_first() -> None:
    wanted = list(
        cells(["azure", "mooncake"], KINDS, [64, 256], ["goodput", "round_robin"], [0, 1])
    )
    assert len(wanted) == len(set(wanted)) == 32
    assert [cell.instances for cell in wanted] == [64] * 16 + [256] * 16
    assert [cell.part for cell in wanted[:16]] == [0] * 8 + [1] * 8


def test_a_part_of_a_short_trace_goes_on_in_another_copy(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:{at // 60:02}:{at % 60:02}.0,{100 + at},10\n" for at in range(600)]
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    trace.write_text(header + "".join(lines), encoding="utf-8")
    profile = tmp_path / "unread.csv"
    load = Load("azure", trace, 3_000, 100, 64)
    second = calls_of(Cell("azure", "a100", 64, "goodput", 1), load, profile)
    assert len(second) == 1_500
    assert [call.index for call in second] == list(range(1_500))
    assert second[0].due_s == 0.0
    # Three copies of 600 calls, from the 1,500th on.
    assert [call.num_prompt_tokens for call in second[:2]] == [400, 401]
    assert second[299].num_prompt_tokens == 699
    assert second[300].num_prompt_tokens == 100


def test_a_table_names_what_each_policy_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"goodput": 78.0, "round_robin": 41.0}

    def run(cell: Cell, _load: Load, _profile: Path, rate: float) -> Point:
        return point(cell, rate, 0.95 if rate <= limits[cell.policy] else 0.8)

    monkeypatch.setattr("benchmarks.simulator.table.run_point", run)
    load = Load("azure", tmp_path, 3_000, 100, 64)
    told: list[tuple[str, float | None]] = []
    runs = Runs(tmp_path)
    wanted = [Cell("azure", "a100", 64, policy, 0) for policy in limits]
    fill(runs, wanted, {"azure": load}, tmp_path, lambda _: None,
         lambda cell, rate: told.append((cell.policy, rate)))  # fmt: skip
    rates = dict(told)
    assert rates["goodput"] is not None
    assert rates["round_robin"] is not None
    lines = as_markdown(runs, list(limits)).splitlines()
    share = rates["goodput"] / rates["round_robin"]
    assert lines[2] == (
        f"| azure | a100 | 64 | 1 | {rates['goodput']:.3g}/s | {rates['round_robin']:.3g}/s "
        f"| {share:.2f} |"
    )


@pytest.mark.parametrize(
    "given",
    [("table", "--rates", "5"), ("points", "--parts", "1"), ("reference", "--loads", "azure")],
)
def test_an_option_that_would_be_ignored_is_refused(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed([*given, "--profiles", "/nowhere"])
    assert f"{given[0]} has no use for {given[1]}" in capsys.readouterr().err


def test_an_option_that_is_not_given_has_its_usual_value() -> None:
    args = parsed(["table", "--profiles", "/nowhere", "--kinds", "a100", "h100"])
    assert (args.kinds, args.instances, args.parts) == (["a100", "h100"], [64], [0])
