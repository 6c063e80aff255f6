"""What the machine does while something is measured: CPU time and memory, ours and everyone else's.

Foreign CPU time is everything the kernel counts as busy, time stolen by the hypervisor included,
less what the given process trees used; it needs no list of names. A share is of one core.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants; empty when it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def resident_mib(pid: int) -> float:
    """Resident memory of the process and its descendants; shared pages count in each of them."""
    total = 0
    for process in tree(pid):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def busy_seconds() -> float:
    """CPU seconds the whole machine has spent since it started, not idle."""
    times = psutil.cpu_times()
    # Guest time is part of user time already.
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in names))


def cpu_seconds(pids: set[int]) -> dict[tuple[int, float], float]:
    """CPU seconds of each process, by pid and start time, with those of children it waited for."""
    used = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            key = (pid, process.create_time())
        except psutil.NoSuchProcess:
            continue
        used[key] = times.user + times.system + times.children_user + times.children_system
    return used


def foreign_seconds(
    busy: float, before: dict[tuple[int, float], float], after: dict[tuple[int, float], float]
) -> float:
    """Busy seconds of the machine less those of the processes in ``after``.

    A process of ours that started meanwhile counts from zero; one that ended is in the
    children's time of its parent.
    """
    ours = sum(used - before.get(key, 0.0) for key, used in after.items())
    return max(0.0, busy - ours)


@dataclass(slots=True)
class ForeignCpu:
    """CPU time of everyone but this process's tree, since it was made."""

    started: float = field(default_factory=time.monotonic)
    busy: float = field(default_factory=busy_seconds)
    ours: dict[tuple[int, float], float] = field(default_factory=lambda: cpu_seconds(_own_pids()))

    def share(self) -> float:
        elapsed = max(1e-3, time.monotonic() - self.started)
        busy = busy_seconds() - self.busy
        return foreign_seconds(busy, self.ours, cpu_seconds(_own_pids())) / elapsed


def _own_pids() -> set[int]:
    return {process.pid for process in tree(os.getpid())}


def describe() -> dict[str, object]:
    """The machine in a few words, for a table's caption."""
    model, flags = "", ""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    model = value.strip()
                if name.strip() == "flags":
                    flags = value
                    break
    except OSError:
        pass
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "features": [name for name in wanted if name in flags.split()],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
