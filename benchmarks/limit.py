"""What this machine's memory and arithmetic units allow: the limits other figures are shares of.

``python -m benchmarks.limit`` reads a buffer far larger than the caches with one and with all
threads, and multiplies matrices of a transformer's shapes with torch and with our own kernels. The
best of several repetitions counts: a limit is what the machine can do, not what it does on average.
CPU time that other processes took meanwhile is printed beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.cluster import OUT
from benchmarks.machine import ForeignCpu, describe
from isthmus.kernels import select

BUFFER_BYTES = 1 << 30
# Rows, depth and width: a prefill step, and the layers of a small and of a large model.
SHAPES = ((512, 576, 3072), (512, 1536, 576), (1024, 2048, 2048))

# Eight independent sums, so that the loop waits for memory and not for its own additions.
READER = """
#include <stdint.h>
#include <stddef.h>
uint64_t read_all(const uint64_t *data, size_t count) {
  uint64_t s[32] = {0};
  for (size_t i = 0; i + 32 <= count; i += 32)
    for (int j = 0; j < 32; j++) s[j] += data[i + j];
  uint64_t total = 0;
  for (int j = 0; j < 32; j++) total += s[j];
  return total;
}
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes and floating-point operations a second, with the number of threads they took."""

    num_threads: int
    read_bytes_per_s_one_thread: float
    read_bytes_per_s: float
    flops_per_s_one_thread: float
    flops_per_s: float
    flops_by_implementation: dict[str, float]
    foreign_cpu: float


def best_seconds(action: Callable[[], object], seconds: float) -> float:
    """The shortest of as many runs as fit into ``seconds``.

    Three at least, unless they take far longer than that (products that a processor has no
    instructions for).
    """
    best, count = float("inf"), 0
    begin = time.perf_counter()
    enough, too_long = begin + seconds, begin + max(1.0, 4 * seconds)
    while (now := time.perf_counter()) < enough or (count < 3 and now < too_long):
        action()
        best = min(best, time.perf_counter() - now)
        count += 1
    return best


Reader = Callable[[np.ndarray], object]


def compiled_reader(folder: Path) -> Reader | None:
    """A C loop that reads every word once; None without a compiler."""
    source, library = folder / "reader.c", folder / "reader.so"
    source.write_text(READER)
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    read_all = ctypes.CDLL(str(library)).read_all
    read_all.restype = ctypes.c_uint64
    read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return lambda data: read_all(data.ctypes.data, data.nbytes // 8)


def read_bandwidth(reader: Reader, num_threads: int, num_bytes: int, seconds: float) -> float:
    """Bytes a second at which ``num_threads`` threads together read ``num_bytes``."""
    data = np.ones(num_bytes // 8, np.uint64)
    parts = np.array_split(data, num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        return num_bytes / best_seconds(lambda: list(pool.map(reader, parts)), seconds)


def matrix_rates(num_threads: int, seconds: float) -> dict[str, float]:
    """The best FLOP/s of each implementation over the shapes, for weights of the named dtype."""
    torch.set_num_threads(num_threads)
    ours = select("cpu", num_threads)
    rates: dict[str, float] = {}
    share = seconds / (4 * len(SHAPES))
    for rows, depth, width in SHAPES:
        x, weight = torch.randn(rows, depth), torch.randn(width, depth)
        narrow_x, narrow = x.bfloat16(), weight.bfloat16()
        packed, packed_fp32 = ours.pack_linear(narrow), ours.pack_linear(weight)
        actions: dict[str, Callable[[], object]] = {
            "torch float32": lambda x=x, w=weight: x @ w.T,
            "torch bfloat16": lambda x=narrow_x, w=narrow: x @ w.T,
            "isthmus float32": lambda x=x, w=packed_fp32: ours.linear(x, w),
            "isthmus bfloat16": lambda x=x, w=packed: ours.linear(x, w),
        }
        for name, action in actions.items():
            rate = 2 * rows * depth * width / best_seconds(action, share)
            rates[name] = max(rates.get(name, 0.0), rate)
    return rates


def measure(num_threads: int, seconds: float = 12.0, num_bytes: int = BUFFER_BYTES) -> Limits:
    """Takes about ``seconds`` on a quiet machine."""
    noise = ForeignCpu()
    with tempfile.TemporaryDirectory() as folder:
        reader: Reader = compiled_reader(Path(folder)) or np.sum
        one, many = (read_bandwidth(reader, n, num_bytes, seconds / 6) for n in (1, num_threads))
    with torch.inference_mode():
        alone = matrix_rates(1, seconds / 3)
        rates = matrix_rates(num_threads, seconds / 3)
    return Limits(
        num_threads=num_threads,
        read_bytes_per_s_one_thread=one,
        read_bytes_per_s=max(one, many),
        flops_per_s_one_thread=max(alone.values()),
        flops_per_s=max(rates.values()),
        flops_by_implementation={
            **{f"{name}, 1 thread": rate for name, rate in alone.items()},
            **{f"{name}, {num_threads} threads": rate for name, rate in rates.items()},
        },
        foreign_cpu=noise.share(),
    )


def report(limits: Limits) -> str:
    rates = {
        "reading, 1 thread": limits.read_bytes_per_s_one_thread,
        f"reading, {limits.num_threads} threads": limits.read_bytes_per_s,
    }
    lines = [f"{name:28} {rate / 1e9:8.1f} GB/s" for name, rate in rates.items()]
    lines += [
        f"{name:28} {rate / 1e9:8.1f} GFLOP/s"
        for name, rate in limits.flops_by_implementation.items()
    ]
    lines.append(f"foreign CPU                  {limits.foreign_cpu:8.0%} of a core")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--mib", type=int, default=BUFFER_BYTES >> 20, help="size of the buffer")
    args = parser.parse_args()
    limits = measure(args.threads, args.seconds, args.mib << 20)
    OUT.mkdir(exist_ok=True)
    result = {"machine": describe(), "limits": asdict(limits)}
    (OUT / "limit.json").write_text(json.dumps(result, indent=1))
    print(report(limits))


if __name__ == "__main__":
    main()
