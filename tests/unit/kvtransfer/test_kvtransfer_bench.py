"""What is measured, how it is compared and drawn; and one short measurement from end to end."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from isthmus.common.errors import ConfigError
from isthmus.kvtransfer.bench.cases import Case, cases_of, parse_size
from isthmus.kvtransfer.bench.report import plot, rows_of
from isthmus.kvtransfer.bench.run import Result, Series, measure, ways_of

POOL = 1 << 20


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4096", 4096), ("16KiB", 16384), ("2 MiB", 2**21), ("1GiB", 2**30)]
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "big", "1.5MiB", "-1", "16kb"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)


def test_only_cases_that_fit_are_measured() -> None:
    found = cases_of(["16KiB", "1MiB"], [1, 32, 1000], POOL)
    assert [case.name for case in found] == ["1 × 16 KiB", "32 × 16 KiB", "1 × 1 MiB"]
    with pytest.raises(ConfigError, match="raise --pool"):
        cases_of(["2MiB"], [1], POOL)


@pytest.mark.parametrize("case", [Case(4096, 1), Case(4096, 100)])
def test_pieces_lie_apart_inside_the_pool_and_are_the_same_for_everyone(case: Case) -> None:
    plans = [list(islice(case.plans(POOL), 3)) for _ in range(2)]
    for one, other in zip(*plans, strict=True):
        assert (one.rows == other.rows).all()
        for column in (0, 1):
            starts = np.sort(one.rows[:, column])
            assert (np.diff(starts) > case.piece_bytes).all()
            assert starts[0] >= 0
            assert starts[-1] + case.piece_bytes <= POOL
    assert (plans[0][0].rows != plans[0][1].rows).any()


def test_connectors_come_with_what_they_are_compared_with() -> None:
    assert ways_of(["shm"]) == ("memcpy", "shm")
    for unknown in ("teleport", "shm, tcp"):
        with pytest.raises(ConfigError, match="not a connector to measure"):
            ways_of([unknown])


def test_rates_are_compared_round_by_round() -> None:
    case = Case(1000, 1000)
    result = Result(
        [
            Series("memcpy", case, [1e-3, 2e-3, 1e-3]),
            Series("raw nixl", case, [2e-3, 4e-3, 2e-3]),
            Series("nixl", case, [4e-3, 4e-3, 4e-3]),
        ],
        {},
    )
    memcpy, raw, ours = rows_of(result)
    assert memcpy["gigabytes_per_s"] == pytest.approx(1.0)
    assert (memcpy["of_memcpy"], memcpy["of_raw"]) == (1.0, None)
    assert raw["of_memcpy"] == pytest.approx(0.5)
    assert ours["of_raw"] == pytest.approx(0.5)
    assert ours["ms"] == pytest.approx(4.0)


def test_short_measurement_is_complete_and_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are of the bench extra")
    cases = cases_of(["4KiB", "16KiB"], [1, 8], POOL)
    result = measure(["memcpy", "shm"], cases, POOL, num_rounds=2, num_writes=2)
    assert result.left_out == {}
    assert {(series.way, series.case) for series in result.series} == {
        (way, case) for way in ("memcpy", "shm") for case in cases
    }
    assert all(len(s.seconds) == 2 and min(s.seconds) > 0 for s in result.series)
    plot(result, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
