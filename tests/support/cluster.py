"""`isthmus up` as an operator runs it: a process of its own, and a look at what it leaves behind.

Everything the cluster starts inherits a mark in its environment, so that a process of it is found
whoever its parent is by then.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "ISTHMUS_TEST_MARK"
START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 60.0
KV_GIB = "0.1"


class Place:
    """Folders and environment of one test's clusters. Paths are short: Ray puts sockets there."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ie2e-"))
        self.mark = secrets.token_hex(8)
        self.temp = self.folder / "t"
        self.temp.mkdir()
        self.environment = os.environ | {
            MARK: self.mark,
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TMPDIR": str(self.temp),
        }

    def isthmus(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            [sys.executable, "-m", "isthmus.cli.main", *arguments],
            capture_output=True,
            text=True,
            input=text,
            env=self.environment,
            timeout=START_TIMEOUT_S,
            check=False,
        )

    def up(self, *arguments: str) -> Cluster:
        """Starts a cluster on a free port and returns once it is ready."""
        return Cluster(self, [*arguments, "--port", "0", "--kv-cache-gib", KV_GIB])

    def leftovers(self) -> list[str]:
        """Processes and files that are still there after a moment; empty when all is tidy."""
        poll(lambda: not self._present(), 30.0)
        return self._present()

    def _present(self) -> list[str]:
        state = [str(file) for file in (self.folder / "state" / "isthmus").glob("*.json")]
        return [*marked_processes(self.mark), *map(str, self.temp.iterdir()), *state]

    def close(self) -> None:
        """Ends what a failed test left, so that it cannot disturb another."""
        for process in marked_processes(self.mark):
            os.kill(int(process.split()[0]), signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class Cluster:
    """A running `isthmus up`; ``ready`` is what it printed."""

    def __init__(self, place: Place, arguments: list[str]) -> None:
        self.place = place
        self._errors = place.folder / f"up-{secrets.token_hex(2)}.err"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "isthmus.cli.main", "up", "-o", "json", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=place.environment,
            )
        self.ready = self._read_ready()
        self.url: str = self.ready["url"]

    def _read_ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if '"instances"' not in line:
            self.process.kill()
            self.process.communicate()
            raise AssertionError(f"the cluster did not start: {line}{self.errors}")
        ready: dict[str, Any] = json.loads(line)
        return ready

    @property
    def errors(self) -> str:
        """What it said on stderr so far."""
        return self._errors.read_text(encoding="utf-8")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def status(self) -> dict[str, Any]:
        done = self.place.isthmus("status", "-o", "json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def pid_of(self, role: str) -> int:
        return next(item["pid"] for item in self.instances() if item["role"] == role)

    def instances(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status()["cluster"]["instances"]
        return found

    def registered(self) -> list[dict[str, Any]]:
        """The record of every instance. One that the machine starved past its lease registers
        again by itself, and is waited for."""
        assert poll(lambda: all(item["info"] for item in self.instances()), 20.0)
        return [item["info"] for item in self.instances()]

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(STOP_TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.wait()


def marked_processes(mark: str) -> list[str]:
    """``pid command`` of every process, this one apart, that has the mark in its environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{folder.name} {command}")
        except OSError:  # gone, or another user's
            continue
    return found


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def poll(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition held before the time was over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
