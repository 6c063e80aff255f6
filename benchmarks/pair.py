"""One prefill + one decode instance of Isthmus beside vLLM's own pair, same weights, same machine.

``python -m benchmarks.pair --vllm-venv DIR`` sets the peer up when it is missing, runs both sides
one after the other, ``--rounds`` times, and prints and saves the medians of the rounds, their
ratios, and the share of CPU time that other processes took while each figure was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cluster import MODEL_NAME, OUT, free_ports, serve, wait_for
from benchmarks.export_model import export
from benchmarks.load import Figures, run_load
from benchmarks.machine import ForeignCpu
from benchmarks.peers import vllm_pair

HERE = Path(__file__).parent
VOCAB = 49_000


@contextmanager
def vllm(model: Path, logs: Path, venv: Path, dtype: str) -> Iterator[str]:
    subprocess.run([str(HERE / "peers" / "vllm_setup.sh"), str(venv)], check=True)
    port, *ports = free_ports(5)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for index in (0, 1):
            log = logs / f"vllm-{index}.log"
            servers.append(
                vllm_pair.start_server(
                    venv, model, ports[index], ports[2 + index], index, log, dtype
                )
            )
        for index in (0, 1):
            vllm_pair.wait_ready(ports[index], servers[index], 600)
        proxy = subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.peers.vllm_pair", "--port", str(port),
                "--prefill-port", str(ports[0]), "--decode-port", str(ports[1]),
            ],
            start_new_session=True, cwd=HERE.parent,
        )  # fmt: skip
        servers.append(proxy)
        wait_for(f"http://127.0.0.1:{port}/health", proxy, 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        for server in servers:
            vllm_pair.stop_server(server)


async def measure(url: str, seed: int, longest: int) -> dict[str, float]:
    """The figures of one side, one round; prompts of up to ``longest`` tokens."""
    common = {"vocab": VOCAB, "model": MODEL_NAME, "url": url}
    await run_load(
        **common, concurrency=2, num_requests=4, prompt_tokens=64, max_tokens=16, seed=seed
    )
    figures: dict[str, float] = {"errors": 0}
    noise = ForeignCpu()
    for length, count in ((128, 8), (512, 3), (2048, 2)):
        if length > longest:
            continue
        run = await run_load(
            **common, concurrency=1, num_requests=count, prompt_tokens=length, max_tokens=4,
            seed=seed + length,
        )  # fmt: skip
        figures[f"ttft_ms_{length}"] = run.ttft_ms
        figures["errors"] += run.num_errors
    alone: Figures = await run_load(
        **common, concurrency=1, num_requests=2, prompt_tokens=128, max_tokens=128, seed=seed + 1
    )
    figures["tpot_ms_alone"] = alone.tpot_ms
    figures["errors"] += alone.num_errors
    for concurrency in (4, 16):
        run = await run_load(
            **common, concurrency=concurrency, num_requests=max(8, concurrency), prompt_tokens=128,
            max_tokens=128, seed=seed + concurrency,
        )  # fmt: skip
        figures[f"tokens_per_s_{concurrency}"] = run.tokens_per_s
        figures["errors"] += run.num_errors
    figures["foreign_cpu"] = noise.share()
    return figures


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}


def table(ours: dict[str, float], peer: dict[str, float] | None) -> str:
    lines = [f"{'figure':20} {'isthmus':>10} {'vllm pair':>10} {'ratio':>7}"]
    for key, value in ours.items():
        other = peer.get(key) if peer else None
        ratio = f"{value / other:7.2f}" if other else "      –"
        shown = "–" if other is None else f"{other:.2f}"
        lines.append(f"{key:20} {value:10.2f} {shown:>10} {ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-venv", type=Path, help="leave out to measure Isthmus alone")
    parser.add_argument(
        "--vllm-dtype",
        default="bfloat16",
        help="float32 is the faster one for vLLM on a CPU without bf16 instructions",
    )
    parser.add_argument("--model-dir", type=Path, default=OUT / "sample-bf16")
    parser.add_argument("--longest", type=int, default=2048, help="longest prompt in tokens")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=("isthmus", "vllm"))
    args = parser.parse_args()
    model = export(args.model_dir.resolve())
    out = OUT / "pair.json"
    results: dict[str, list[dict[str, float]]] = {"isthmus": [], "vllm": []}
    if args.only and out.exists():  # the other side keeps what it has shown
        results |= json.loads(out.read_text())
        results[args.only] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number in range(args.rounds):
            seed = 1000 * number
            if args.only != "vllm":
                with serve(model, "--dtype", "bfloat16") as running:
                    figures = asyncio.run(measure(running.url, seed, args.longest))
                results["isthmus"].append(figures)
                out.write_text(json.dumps(results, indent=1))
            if args.only != "isthmus" and args.vllm_venv:
                with vllm(model, Path(folder), args.vllm_venv.resolve(), args.vllm_dtype) as url:
                    figures = asyncio.run(measure(url, seed, args.longest))
                results["vllm"].append(figures)
                out.write_text(json.dumps(results, indent=1))
    sides = {name: median_of(rounds) for name, rounds in results.items() if rounds}
    if "isthmus" in sides:
        print(table(sides["isthmus"], sides.get("vllm")))
    else:
        print(json.dumps(sides, indent=1))


if __name__ == "__main__":
    main()
