"""For every test: a tidy environment before it, and nothing of it left afterwards.

Checked after each test: threads that would keep the interpreter alive, child processes, and (for
tests with an event loop) tasks. What multiprocessing keeps for itself is not a leak.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import pytest_asyncio
import structlog

from tests.support.ports import held_port

# The default run tries the same cases every time, so that what it says about a commit is about that
# commit; `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("fixed")

GRACE_S = 3.0
_KEPT_BY_MULTIPROCESSING = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def pytest_configure() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # A developer's own settings must not reach the configurations that tests make.
    for name in [name for name in os.environ if name.startswith("ISTHMUS_")]:
        del os.environ[name]


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port on which nobody listens but who is told to: see ``held_port``."""
    with held_port() as port:
        yield port


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up first and torn down last, so every other fixture has had its turn to clean up."""
    threads_before = set(threading.enumerate())
    children_before = child_processes()
    if request.node.get_closest_marker("asyncio"):
        request.getfixturevalue("no_leaked_tasks")
    yield
    _expect_none(lambda: _lasting_threads() - threads_before, "threads left running")
    _expect_none(lambda: child_processes() - children_before, "child processes left running")


@pytest.fixture(autouse=True)
def tidy_logs() -> Iterator[None]:
    """A command that a test runs in this process makes logs go to a stderr that is that test's."""
    before = structlog.get_config() if structlog.is_configured() else None
    yield
    if before is not None:
        structlog.configure(**before)
    else:
        structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest_asyncio.fixture
async def no_leaked_tasks() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    deadline = time.monotonic() + GRACE_S
    current = asyncio.current_task()
    while left := {t for t in asyncio.all_tasks() - before if t is not current and not is_grpcs(t)}:
        gc.collect()  # a gRPC call that nobody holds any more ends with its object
        if time.monotonic() > deadline:
            pytest.fail(f"asyncio tasks left running: {sorted(map(repr, left))}")
        await asyncio.sleep(0.001)


def is_grpcs(task: asyncio.Task[object]) -> bool:
    """gRPC waits in tasks of its own for what a dead peer's socket takes long to tell, or never
    tells a server that has stopped: a cancelled call's status, and the end of sending an answer."""
    names = _awaited(task.get_coro())
    return "execute_batch" in names or "_handle_status_once_received" in repr(task.get_coro())


def _awaited(coroutine: object) -> list[str]:
    """Names of a coroutine and of those that it waits for, as far as they can be looked into. gRPC
    wraps a servicer's method in something that cannot, so what a method waits for is never here."""
    names = []
    while coroutine is not None:
        names.append(getattr(coroutine, "__name__", ""))
        coroutine = getattr(coroutine, "cr_await", None)
    return names


def _expect_none(left: Callable[[], set[object]], what: str) -> None:
    deadline = time.monotonic() + GRACE_S
    while found := left():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: {sorted(map(str, found))}")
        time.sleep(0.005)


def _lasting_threads() -> set[object]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def child_processes() -> set[object]:
    """Direct children of this process as (pid, command line), multiprocessing's own left out."""
    children: set[object] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:  # the thread has ended
            continue
        for pid in pids:
            command = _command_line(pid)
            if not any(name in command for name in _KEPT_BY_MULTIPROCESSING):
                children.add((int(pid), command.replace(b"\0", b" ").decode(errors="replace")))
    return children


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
