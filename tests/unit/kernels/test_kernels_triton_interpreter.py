"""What the interpreter's process does with a test's body is what pytest reports of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.triton_interpreter import InterpreterProcess

BODIES = """
import os
import pytest

def passes(value):
    assert value == 3 and os.environ["TRITON_INTERPRET"] == "1"

def fails():
    assert 1 + 1 == 3, "as it should"

def skips():
    pytest.skip("no need")

def dies():
    print("last words", flush=True)
    os._exit(7)
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InterpreterProcess]:
    path = tmp_path_factory.mktemp("interpreter") / "bodies.py"
    path.write_text(BODIES)
    with InterpreterProcess(path) as started:
        yield started


def test_a_body_runs_with_its_arguments_and_the_variable_set(process: InterpreterProcess) -> None:
    process.call("passes", {"value": 3})


def test_a_failing_body_fails_with_its_own_traceback(process: InterpreterProcess) -> None:
    with pytest.raises(pytest.fail.Exception, match="as it should"):
        process.call("fails", {})


def test_a_skipping_body_skips(process: InterpreterProcess) -> None:
    with pytest.raises(pytest.skip.Exception, match="no need"):
        process.call("skips", {})


def test_a_body_that_ends_its_process_fails_with_what_it_said(tmp_path: Path) -> None:
    path = tmp_path / "bodies.py"
    path.write_text(BODIES)
    with (
        InterpreterProcess(path) as process,
        pytest.raises(pytest.fail.Exception, match="last words"),
    ):
        process.call("dies", {})
