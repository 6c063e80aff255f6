"""What one KV transfer over NIXL costs, block-major against layer-major, between two processes.

::

    python benchmarks/transfer.py                     # both transports, SmolLM2-135M's shape
    python benchmarks/transfer.py --tls tcp --blocks 32

The two layouts are measured alternately in one go, over the same blocks and the same connection:

    block-major  [N, L, 2, G, B, D]   one descriptor a block
    layer-major  [L, 2, N, G, B, D]   2·L descriptors a block

A sample is one write of scattered blocks: planning and posting (``post_ms``) and the whole way to
DONE, flushed and notified (``total_ms``). ``idle_cpu`` is CPU seconds per second of an agent with
nothing to do, with and without NIXL's progress thread. Results go to ``benchmarks/out`` as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from isthmus.common.kv_layout import KvLayout
from isthmus.kvtransfer.interface import CopyOp, MemoryRegion, PeerName, WriteState

LAYOUT = KvLayout("bench", 30, 3, 64, 16, "bfloat16")  # SmolLM2-135M
NUM_BLOCKS = 256
LAYOUTS = ("block-major", "layer-major")


@dataclass(frozen=True)
class Sample:
    tls: str
    layout: str
    num_blocks: int
    num_descriptors: int
    megabytes: float
    post_ms: float
    total_ms: float
    gigabytes_per_s: float
    num_writes: int


def granularity(layout: str) -> int:
    return LAYOUT.block_bytes if layout == "block-major" else LAYOUT.layer_kv_bytes


def plan(layout: str, sources: np.ndarray, targets: np.ndarray) -> list[CopyOp]:
    """One copy for each piece that is contiguous on both sides."""
    size = granularity(layout)
    if layout == "block-major":
        return [
            CopyOp(s * size, t * size, size)
            for s, t in zip(sources.tolist(), targets.tolist(), strict=True)
        ]
    return [
        CopyOp((plane * NUM_BLOCKS + s) * size, (plane * NUM_BLOCKS + t) * size, size)
        for plane in range(2 * LAYOUT.num_layers)
        for s, t in zip(sources.tolist(), targets.tolist(), strict=True)
    ]


def serve(pipe: Connection) -> None:
    """The target: one connector a layout, driven all the time until told to stop."""
    from isthmus.kvtransfer.connectors.nixl import NixlConnector

    connectors = []
    for layout in LAYOUTS:
        memory = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
        region = MemoryRegion(memory.ctypes.data, memory.nbytes)
        connector = NixlConnector(f"target-{layout}", granularity(layout))
        connector.register(region)
        connectors.append((connector, memory))
        pipe.send((connector.metadata(), region))
    while not pipe.poll(0.0001):
        for connector, _ in connectors:
            connector.take_notifications()
    for connector, _ in connectors:
        connector.close()


def measure(tls: str, counts: list[int], num_writes: int) -> dict[str, object]:
    """In a process whose UCX_TLS is set already."""
    from isthmus.kvtransfer.connectors.nixl import NixlConnector

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=serve, args=(theirs,))
    child.start()
    ends: dict[str, tuple[NixlConnector, PeerName]] = {}
    prepare_ms: dict[str, float] = {}
    memories = []
    for layout in LAYOUTS:
        memory = np.ones(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
        memories.append(memory)
        connector = NixlConnector(f"source-{layout}", granularity(layout))
        connector.register(MemoryRegion(memory.ctypes.data, memory.nbytes))
        metadata, region = pipe.recv()
        start = time.perf_counter()
        ends[layout] = (connector, connector.add_peer(metadata, region))
        prepare_ms[layout] = 1e3 * (time.perf_counter() - start)
    samples = []
    for count in counts:
        timings: dict[str, list[tuple[float, float]]] = {layout: [] for layout in LAYOUTS}
        random = np.random.default_rng(0)
        for number in range(num_writes + 3):
            sources, targets = (random.permutation(NUM_BLOCKS)[:count] for _ in range(2))
            for layout in LAYOUTS:
                timing = write_once(*ends[layout], layout, sources, targets)
                if number >= 3:  # the first ones make the connection and touch the pages
                    timings[layout].append(timing)
        samples += [summarise(tls, layout, count, timings[layout]) for layout in LAYOUTS]
    pipe.send("stop")
    child.join(20)
    for connector, _ in ends.values():
        connector.close()
    return {"samples": [asdict(sample) for sample in samples], "prepare_peer_ms": prepare_ms}


def write_once(connector, peer, layout, sources, targets) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    handle = connector.post_write(peer, plan(layout, sources, targets), b"n" * 40)
    posted = time.perf_counter()
    while (state := connector.poll(handle)) is WriteState.IN_PROGRESS:
        pass
    ended = time.perf_counter()
    assert state is WriteState.DONE
    connector.release(handle)
    return posted - start, ended - start


def summarise(tls: str, layout: str, count: int, timings: list[tuple[float, float]]) -> Sample:
    num_bytes = count * LAYOUT.block_bytes
    total = statistics.median(total for _, total in timings)
    return Sample(
        tls=tls or "default (CMA)",
        layout=layout,
        num_blocks=count,
        num_descriptors=num_bytes // granularity(layout),
        megabytes=num_bytes / 1e6,
        post_ms=1e3 * statistics.median(post for post, _ in timings),
        total_ms=1e3 * total,
        gigabytes_per_s=num_bytes / total / 1e9,
        num_writes=len(timings),
    )


def idle_cpu(seconds: float) -> dict[str, float]:
    """CPU seconds per second of this process while an agent does nothing."""
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    import isthmus.kvtransfer.connectors.nixl  # noqa: F401 - sets UCX up

    used = {}
    for name, has_thread in (("without progress thread", False), ("with progress thread", True)):
        agent = nixl_agent(f"idle-{has_thread}", nixl_agent_config(enable_prog_thread=has_thread))
        start = time.process_time()
        time.sleep(seconds)
        used[name] = (time.process_time() - start) / seconds
        del agent
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tls", action="append", help="a UCX_TLS value; default: '' and tcp")
    parser.add_argument("--blocks", type=int, action="append", help="default: 1, 32 and 128")
    parser.add_argument("--writes", type=int, default=30, help="measured writes per cell")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/transfer.json"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    counts = arguments.blocks or [1, 32, 128]
    if arguments.measure is not None:
        if arguments.measure == "idle":
            print(json.dumps(idle_cpu(2.0)))
        else:
            tls = arguments.measure.partition("=")[2]
            print(json.dumps(measure(tls, counts, arguments.writes)))
        return
    results: dict[str, object] = {"layout": asdict(LAYOUT), "load_average": os.getloadavg()}
    flags = [item for count in counts for item in ("--blocks", str(count))]
    for tls in arguments.tls or ["", "tcp"]:
        results[f"tls={tls}"] = run_self([f"--measure=tls={tls}", *flags], arguments.writes, tls)
    results["idle_cpu"] = run_self(["--measure=idle"], arguments.writes, "")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2))
    report(results)


def run_self(flags: list[str], num_writes: int, tls: str) -> dict[str, object]:
    """UCX reads its environment once, so every transport has a process of its own."""
    environ = {**os.environ, **({"UCX_TLS": tls} if tls else {})}
    command = [sys.executable, __file__, *flags, "--writes", str(num_writes)]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def report(results: dict[str, object]) -> None:
    header = ("transport", "layout", "blocks", "descr.", "MB", "post ms", "total ms", "GB/s")
    print("{:<14} {:<12} {:>6} {:>7} {:>7} {:>8} {:>9} {:>6}".format(*header))
    for value in results.values():
        if not isinstance(value, dict) or "samples" not in value:
            continue
        for s in value["samples"]:
            print(
                f"{s['tls']:<14} {s['layout']:<12} {s['num_blocks']:>6} {s['num_descriptors']:>7} "
                f"{s['megabytes']:>7.1f} {s['post_ms']:>8.3f} {s['total_ms']:>9.3f} "
                f"{s['gigabytes_per_s']:>6.2f}"
            )
        print("  add a peer, ms:", {k: round(v, 2) for k, v in value["prepare_peer_ms"].items()})
    print("idle CPU (s/s):", results["idle_cpu"], " load average:", results["load_average"])


if __name__ == "__main__":
    main()
