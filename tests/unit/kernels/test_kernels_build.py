"""How the library is found, compiled, kept and done without."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from isthmus.kernels import reference, registry
from isthmus.kernels.cpu import BuildError, build
from isthmus.kernels.cpu.binding import load_library
from tests.support.poll import poll_until

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = "--version" ]; then echo "fake {version}"; exit 0; fi
echo run >> "{log}"
{body}
"""
WRITES_OUTPUT = 'while [ "$1" != "-o" ]; do shift; done; echo library > "$2"'


class Compiler:
    """A shell script in the place of g++ that counts how often it compiles."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "g++"
        self.log = directory / "log"

    def install(self, body: str = WRITES_OUTPUT, version: str = "1") -> None:
        self.path.write_text(FAKE_COMPILER.format(version=version, log=self.log, body=body))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def num_runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    found = Compiler(directory)
    found.install()
    return found


def test_a_library_is_compiled_once_and_then_found(compiler: Compiler, tmp_path: Path) -> None:
    first = build.build_library(tmp_path / "cache")
    assert build.build_library(tmp_path / "cache") == first
    assert first.read_text() == "library\n"
    assert compiler.num_runs == 1
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_another_compiler_makes_another_library(compiler: Compiler, tmp_path: Path) -> None:
    first = build.build_library(tmp_path / "cache")
    compiler.install(version="2")
    assert build.build_library(tmp_path / "cache") != first


def test_the_cache_is_the_users_own(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.build_library().parent == tmp_path / "xdg" / "isthmus" / "kernels"


def test_builds_at_the_same_time_all_get_a_whole_library(
    compiler: Compiler, tmp_path: Path
) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(build.build_library(tmp_path / "cache")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert list((tmp_path / "cache").iterdir()) == [found[0]]


def test_a_build_that_a_signal_ended_leaves_nothing_behind_the_next_one(
    compiler: Compiler, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    compiler.install(body="exec sleep 60")
    code = "import sys; from pathlib import Path; from isthmus.kernels.cpu import build; "
    code += "build.build_library(Path(sys.argv[1]))"
    ended = subprocess.Popen([sys.executable, "-c", code, str(cache)], start_new_session=True)
    try:
        asyncio.run(poll_until(lambda: compiler.num_runs == 1))
        (under_way,) = cache.iterdir()
        compiler.install(version="2")
        library = build.build_library(cache)
        assert under_way.exists()  # somebody works there
    finally:
        os.killpg(ended.pid, signal.SIGTERM)
        ended.wait(30)
    assert under_way.exists()
    compiler.install(version="3")
    newest = build.build_library(cache)
    assert set(cache.iterdir()) == {library, newest}


def test_a_failed_compilation_says_why_and_leaves_nothing(
    compiler: Compiler, tmp_path: Path
) -> None:
    compiler.install(body='echo "no such header" >&2; exit 1')
    with pytest.raises(BuildError, match="no such header"):
        build.build_library(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "isthmus.so"
    path.write_text("not a library")
    with pytest.raises(BuildError, match="cannot load"):
        load_library(path)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    # Choices made before, with a compiler, stay out of this test; its own stay out of the others.
    monkeypatch.setattr(registry, "_select", registry._select.__wrapped__)


def test_without_a_compiler_the_reference_takes_over(no_compiler: None) -> None:
    kernels = registry.select("cpu")
    assert kernels.linear is reference.linear
    assert "reference" in kernels.describe()
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    assert torch.allclose(kernels.linear(x, kernels.pack_linear(weight)), x @ weight.T)


def test_asking_for_compiled_kernels_by_name_does_not_fall_back(no_compiler: None) -> None:
    with pytest.raises(BuildError, match="compiler"):
        registry.select("cpu", 1, "cpu")


def test_the_default_kernels_of_the_cpu_name_themselves() -> None:
    assert registry.describe("cpu") == registry.select("cpu").describe()
    assert registry.select("cpu", 1, "reference").describe().startswith("reference")
