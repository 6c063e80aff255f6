from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.controlplane.logs import last_problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ""),
        ("Segmentation fault\n\n", "Segmentation fault"),
        ("x [error] cannot start code=model_file problem='no model at /x'\n", "no model at /x"),
        ('x [error] cannot start problem="it\'s gone" stage=load\nbye\n', "it's gone"),
        ("x [error] cannot start problem=short\n", "short"),
        ('{"event": "cannot start", "problem": "no model"}\n{"event": "bye"}\n', "no model"),
        ("problem='first'\nproblem='last'\n", "last"),
        ("{not json\n", "{not json"),
    ],
)
def test_problem_is_found_in_both_formats(tmp_path: Path, text: str, problem: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(text)
    assert last_problem(log) == problem


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("problem='old'\n" + "noise\n" * 10_000)
    assert last_problem(log) == "noise"


def test_missing_log_is_no_problem(tmp_path: Path) -> None:
    assert last_problem(tmp_path / "none.log") == ""
