"""Compiles C++ sources of ours for the machine at hand, on first use.

The result lives in a cache of the user, named by a digest of everything that shapes it: sources,
flags, compiler and the processor's features (a home directory may be shared by unlike machines).
A file there is complete and never changes: it is written beside and renamed, so that processes
that start together may build at the same time, and a process may hold the library it has loaded.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.common.logging import get_logger

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
COMPILERS = ("g++", "c++")
TIMEOUT_S = 300
_WORKSPACE = "building-"

_log = get_logger("native")


class BuildError(Exception):
    """There is no compiler, it failed, or its result cannot be loaded."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Every ``.cpp`` in ``directory`` becomes one library, which ``name`` names in logs and in the
    cache. ``flags``: beside ``FLAGS``."""

    name: str
    directory: Path
    flags: tuple[str, ...] = ()

    @property
    def units(self) -> list[Path]:
        return sorted(self.directory.glob("*.cpp"))

    @property
    def headers(self) -> list[Path]:
        return sorted(self.directory.glob("*.h"))


def build_library(sources: Sources, cache_dir: Path | None = None) -> Path:
    """The compiled library; compiles it (seconds to half a minute) unless it is in the cache.

    Raises BuildError.
    """
    compiler = _find_compiler()
    directory = cache_dir or _default_cache_dir() / sources.name
    target = directory / f"isthmus-{_digest(sources, compiler)}.so"
    if target.exists():
        return target
    _log.info("compiling", library=sources.name, compiler=compiler, target=str(target))
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _workspace(directory) as workspace:
            built = workspace / target.name
            units = map(str, sources.units)
            _run([compiler, *FLAGS, *sources.flags, *units, "-o", str(built)])
            built.replace(target)
    except OSError as error:
        raise BuildError(f"cannot write to {directory}: {error}") from error
    return target


def bind_function(
    handle: ctypes.CDLL,
    name: str,
    *argument_types: type[Any],
    result: type[Any] | None = None,
) -> Any:
    """The library's ``isthmus_<name>``. Raises AttributeError when it has none."""
    function = handle[f"isthmus_{name}"]
    function.argtypes = argument_types
    function.restype = result
    return function


@contextmanager
def _workspace(directory: Path) -> Iterator[Path]:
    """A folder that goes with its block, or, where a signal ended that, when the next one is made:
    whoever builds holds a lock on its own. Raises OSError."""
    for left in directory.glob(f"{_WORKSPACE}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    made = Path(tempfile.mkdtemp(dir=directory))
    try:
        with _locked(made):  # before it has the name that others look for
            made = made.rename(made.with_name(_WORKSPACE + made.name))
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises OSError where somebody else holds it."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _find_compiler() -> str:
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


def _default_cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "isthmus"
    except RuntimeError as error:  # a user that the system does not know
        raise BuildError(f"nowhere to keep the library: {error}") from error


def _digest(sources: Sources, compiler: str) -> str:
    digest = hashlib.sha256()
    for path in (*sources.units, *sources.headers):
        digest.update(path.read_bytes())
    version = _run([compiler, "--version"])
    described = (compiler, version, platform.machine(), _processor_features())
    for part in (*FLAGS, *sources.flags, *described):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _processor_features() -> str:
    """What -march=native looks at, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
