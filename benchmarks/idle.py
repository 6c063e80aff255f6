"""CPU that an idle cluster uses, process by process: one prefill + one decode instance.

``python -m benchmarks.idle`` starts the cluster with each actuator, lets it come to rest, and
counts the CPU seconds of every process of its tree over ``--seconds``. Shares are of one core.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.cluster import OUT, serve
from benchmarks.machine import ForeignCpu, tree


@dataclass(frozen=True, slots=True)
class Usage:
    name: str
    pid: int
    share: float
    voluntary_switches_per_s: float


def label(process: psutil.Process) -> str:
    """What a process is, from its command line: our own modules and Ray's programs by name."""
    words = process.cmdline()
    for word in words:
        if word.startswith("ray::"):
            return word
    if "-m" in words:
        following = words[words.index("-m") + 1 :]
        return " ".join(following[:2])
    if "-c" in words:
        return f"{Path(words[0]).name} -c"
    programs = [Path(word).name for word in words if not word.startswith("-")]
    return " ".join(programs[:2]) or process.name()


def voluntary_switches(pid: int) -> int:
    """Of all threads of a process; the sum can fall when one ends."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue
        total += sum(int(x.split()[1]) for x in lines if x.startswith("voluntary_ctxt_switches"))
    return total


def snapshot(pid: int) -> dict[int, tuple[str, float, int]]:
    """Name, CPU seconds and voluntary context switches of each process of the tree."""
    found = {}
    for process in tree(pid):
        try:
            times = process.cpu_times()
            switches = voluntary_switches(process.pid)
            found[process.pid] = (label(process), times.user + times.system, switches)
        except psutil.NoSuchProcess:
            continue
    return found


def usages(
    before: dict[int, tuple[str, float, int]],
    after: dict[int, tuple[str, float, int]],
    seconds: float,
) -> list[Usage]:
    """Of the processes that lived all the time, the busiest first."""
    found = [
        Usage(
            name,
            pid,
            (used - before[pid][1]) / seconds,
            (switches - before[pid][2]) / seconds,
        )
        for pid, (name, used, switches) in after.items()
        if pid in before
    ]
    return sorted(found, key=lambda usage: -usage.share)


def measure(actuator: str, seconds: float, rest_s: float, flags: list[str]) -> dict[str, object]:
    with serve("sample", "--actuator", actuator, *flags) as running:
        time.sleep(rest_s)
        noise, started = ForeignCpu(), time.monotonic()
        before = snapshot(running.pid)
        time.sleep(seconds)
        found = usages(before, snapshot(running.pid), time.monotonic() - started)
        foreign = noise.share()
    return {
        "actuator": actuator,
        "total_share": sum(usage.share for usage in found),
        "processes": [asdict(usage) for usage in found],
        "foreign_cpu": foreign,
    }


def report(result: dict[str, object]) -> None:
    print(f"{result['actuator']}: {result['total_share']:.1%} of a core in total")
    for usage in result["processes"]:  # type: ignore[attr-defined]
        rate = usage["voluntary_switches_per_s"]
        print(f"  {usage['share']:7.2%} {rate:8.1f} wake-ups/s  {usage['pid']:>7}  {usage['name']}")
    print(f"  foreign CPU {result['foreign_cpu']:.0%} of a core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds before it counts")
    parser.add_argument("--actuator", action="append", choices=("ray", "process"))
    parser.add_argument("flags", nargs="*", help="more flags of `isthmus up`, after --")
    args = parser.parse_args()
    results = []
    for actuator in args.actuator or ("process", "ray"):
        results.append(measure(actuator, args.seconds, args.rest, args.flags))
        report(results[-1])
    OUT.mkdir(exist_ok=True)
    (OUT / "idle.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
