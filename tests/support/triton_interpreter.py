"""Runs the bodies of tests under Triton's interpreter, in a process of their file's own.

Whether Triton interprets or compiles is settled by ``TRITON_INTERPRET`` when it is first imported,
for the whole process and for good. So a file of such tests says::

    pytestmark = pytest.mark.interpreted

and pytest collects it, resolves its parameters and fixtures, and reports each case as ever, but the
body runs in a child process of the file, started with the variable set. Parameters and fixtures
travel there: they must be picklable. With ``TRITON_INTERPRET=1 pytest FILE`` the bodies run in
pytest itself, where a debugger reaches them.

``tests/unit/kernels/conftest.py`` makes the two hooks known to pytest.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from enum import Enum
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "TRITON_INTERPRET"
CALL_DEADLINE_S = 55.0
END_DEADLINE_S = 10.0


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


READY = "ready"


class InterpreterProcess:
    """A child that has loaded one test file and calls its functions one by one, on request."""

    def __init__(self, path: Path) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(path)],
                env=os.environ | {VARIABLE: "1"},
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
        # Only now does the system surely show its own command line, by which leaks are looked for.
        if not self._connection.poll(CALL_DEADLINE_S) or self._connection.recv() != READY:
            raise RuntimeError("the interpreter's process does not start")

    def __enter__(self) -> InterpreterProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()  # which ends the child
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def call(self, function: str, arguments: Mapping[str, object]) -> None:
        """Runs one body. Fails or skips the current test as the body did."""
        try:
            self._connection.send((function, dict(arguments)))
            if not self._connection.poll(CALL_DEADLINE_S):
                self._process.kill()
                self._process.wait()
                pytest.fail(f"{function}: no end within {CALL_DEADLINE_S:.0f} s", pytrace=False)
            outcome, text = self._connection.recv()
        except (EOFError, OSError):
            pytest.fail(f"the interpreter's process is gone\n{self._tail()}", pytrace=False)
        if outcome is Outcome.SKIPPED:
            pytest.skip(text)
        if outcome is Outcome.FAILED:
            pytest.fail(text, pytrace=False)

    def _tail(self) -> str:
        self._process.wait(END_DEADLINE_S)
        self._output.seek(0)
        return self._output.read()[-4000:].decode(errors="replace")


@pytest.fixture(autouse=True, scope="module")
def interpreter_process(request: pytest.FixtureRequest) -> Iterator[InterpreterProcess | None]:
    """The file's child process; None for a file that is not marked."""
    if request.node.get_closest_marker("interpreted") is None or VARIABLE in os.environ:
        yield None
        return
    with InterpreterProcess(request.node.path) as process:
        yield process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    process = pyfuncitem.funcargs.get("interpreter_process")
    if not isinstance(process, InterpreterProcess):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    process.call(pyfuncitem.originalname, {name: pyfuncitem.funcargs[name] for name in names})
    return True


def serve(connection: Connection, path: Path) -> NoReturn:
    """The child's side: until the other end is closed."""
    connection.send(READY)
    module = _load(path)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            os._exit(0)  # at once: tidying up after torch takes seconds and is of use to nobody
        connection.send(_outcome_of(module, function, arguments))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _outcome_of(
    module: ModuleType, function: str, arguments: dict[str, object]
) -> tuple[Outcome, str]:
    try:
        getattr(module, function)(**arguments)
    except pytest.skip.Exception as skipped:
        return Outcome.SKIPPED, str(skipped)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a test raises anything
        return Outcome.FAILED, traceback.format_exc()
    return Outcome.PASSED, ""


if __name__ == "__main__":
    # By its import name: what travels between the two processes must be of the same module.
    from tests.support import triton_interpreter

    triton_interpreter.serve(Connection(int(sys.argv[1])), Path(sys.argv[2]))
