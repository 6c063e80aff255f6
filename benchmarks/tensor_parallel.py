"""An instance of several ranks beside one of one rank: equal tokens, in how much memory and time.

``python -m benchmarks.tensor_parallel`` takes a few minutes on two cores. Every engine runs in a
fresh process, its followers as children; prompts are given all at once, end-of-sequence ignored,
greedy and seeded. Exits with 1 when a token differs or a rank needs more than its share of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from benchmarks.cluster import OUT
from isthmus.gateway.tokenizer import TextTokenizer, load_tokenizer

BLOCK_SIZE = 16
CHUNK = 512
LONGEST = 300
MAX_SHARE = 0.6  # of one rank's weights, on two
SEEDED = {"temperature": 0.9, "top_p": 0.95}


@dataclass(frozen=True)
class Side:
    """What one engine gave. Memory in bytes, one entry per rank."""

    greedy: list[list[int]]
    seeded: list[list[int]]
    weight_bytes: list[int]
    anonymous: list[int]
    """Private memory of each process, KV blocks taken off."""
    seconds: float
    cpu_seconds: float
    decode_step_ms: float


def run_side(model: str, dtype: str, tp_size: int, prompts: list[list[int]], tokens: int) -> Side:
    """In a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    return asyncio.run(_run_side(model, dtype, tp_size, prompts, tokens))


async def _run_side(
    model: str, dtype: str, tp_size: int, prompts: list[list[int]], tokens: int
) -> Side:
    import torch

    from isthmus.common.clock import SystemClock
    from isthmus.common.cluster import Role
    from isthmus.common.config import ClusterConfig
    from isthmus.common.ids import InstanceId
    from isthmus.engine.core import EngineCore
    from isthmus.worker.rank_launcher import ChildLauncher
    from isthmus.worker.ranks import Ranks
    from isthmus.worker.role import WorkerArgs
    from tests.support.engine_driver import Driver, make_request

    torch.set_num_threads(1)
    num_blocks = 2 + sum(-(-(len(prompt) + tokens) // BLOCK_SIZE) for prompt in prompts)
    engine = {
        "tp_size": tp_size, "block_size": BLOCK_SIZE, "num_blocks": num_blocks,
        "max_num_batched_tokens": CHUNK, "watermark": 0.0, "enable_prefix_cache": False,
    }  # fmt: skip
    config = ClusterConfig.model_validate(
        {"model": {"path": model, "dtype": dtype}, "mixed": {"engine": engine}}
    )
    ranks = None
    if tp_size == 1:
        core = EngineCore.build(config.model, config.mixed.engine, SystemClock())
        pids, weight_bytes = (os.getpid(),), (core.spec.weight_bytes,)
    else:
        ranks = Ranks(WorkerArgs(config, Role.MIXED, InstanceId("mixed-0"), ""), ChildLauncher())
        ranks.launch()
        core = await ranks.start(SystemClock())
        pids, weight_bytes = ranks.pids, ranks.weight_bytes
    kv_bytes = [
        core.kv_store.num_bytes * heads // core.spec.num_kv_heads for heads in _kv_heads(core)
    ]
    memory = [anonymous(pid) - kv for pid, kv in zip(pids, kv_bytes, strict=True)]

    def outputs(label: str, **sampling: object) -> list[list[int]]:
        driver = Driver(core)
        for index, prompt in enumerate(prompts):
            seed = {"seed": 1234 + index} if sampling else {}
            name = f"{label}-{index}"
            core.add(make_request(name, tuple(prompt), max_tokens=tokens, **sampling, **seed))
        found = driver.run()
        return [found[f"{label}-{index}"].token_ids for index in range(len(prompts))]

    began, began_cpu = time.perf_counter(), time.process_time()
    greedy = outputs("greedy")
    seeded = outputs("seeded", **SEEDED)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    step_ms = decode_step_ms(core)
    core.close()
    if ranks is not None:
        ranks.close()
    return Side(greedy, seeded, list(weight_bytes), memory, seconds, cpu_seconds, step_ms)


def _kv_heads(core: object) -> list[int]:
    from isthmus.common.kv_layout import head_ranges

    layout = core.kv_layout  # type: ignore[attr-defined]
    return [len(heads) for heads in head_ranges(layout.model_kv_heads, layout.tp_size)]


def decode_step_ms(core: object, num_steps: int = 40) -> float:
    """The best decode step of one sequence."""
    from tests.support.engine_driver import make_prompt, make_request

    core.add(make_request("alone", make_prompt(64), max_tokens=num_steps))  # type: ignore[attr-defined]
    best = float("inf")
    while True:
        began = time.perf_counter()
        output = core.step()  # type: ignore[attr-defined]
        if output is None:
            return best
        if output.num_decode_tokens:
            best = min(best, 1000 * (time.perf_counter() - began))


def anonymous(pid: int) -> int:
    """Bytes of memory that no file backs: what a process needs whatever else the machine does."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"the kernel says nothing of process {pid}")


def baseline() -> int:
    """Of a process that has imported everything and loaded nothing."""
    import isthmus.engine.tp_steps
    import isthmus.worker.process  # noqa: F401

    return anonymous(os.getpid())


class Encoder:
    """A tokenizer as ``awkward_prompts`` wants it."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=self._tokenizer.encode(text, add_special_tokens=False))


def main(argv: Sequence[str] | None = None) -> int:
    from isthmus.common.model_files import locate_model, sample_model_path
    from tests.support.oracle import awkward_prompts

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(sample_model_path()))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=OUT / "tensor_parallel.json")
    options = parser.parse_args(argv)
    tokenizer = Encoder(load_tokenizer(locate_model(options.model)))
    prompts = awkward_prompts(
        tokenizer, options.prompts, block_size=BLOCK_SIZE, chunk_size=CHUNK, longest=LONGEST
    )
    context = multiprocessing.get_context("spawn")

    def in_process(work: object, *args: object) -> object:
        with context.Pool(1, maxtasksperchild=1) as pool:
            return pool.apply(work, args)  # type: ignore[arg-type]

    empty = in_process(baseline)
    assert isinstance(empty, int)
    sides = {}
    for size in (1, options.tp_size):
        side = in_process(run_side, options.model, options.dtype, size, prompts, options.tokens)
        assert isinstance(side, Side)
        sides[size] = side
    return report(sides[1], sides[options.tp_size], empty, options)


def report(one: Side, many: Side, empty: int, options: argparse.Namespace) -> int:
    weights = one.weight_bytes[0]
    memory = one.anonymous[0] - empty
    found = {
        "dtype": options.dtype,
        "tp_size": options.tp_size,
        "prompts": len(one.greedy),
        "equal_greedy": sum(a == b for a, b in zip(one.greedy, many.greedy, strict=True)),
        "equal_seeded": sum(a == b for a, b in zip(one.seeded, many.seeded, strict=True)),
        "weight_mib": [round(size / 2**20, 1) for size in (weights, *many.weight_bytes)],
        "weight_share": [round(size / weights, 3) for size in many.weight_bytes],
        "loaded_mib": [
            round((size - empty) / 2**20, 1) for size in (one.anonymous[0], *many.anonymous)
        ],
        "loaded_share": [round((size - empty) / memory, 3) for size in many.anonymous],
        "seconds": [round(one.seconds, 1), round(many.seconds, 1)],
        "leader_cpu_seconds": [round(one.cpu_seconds, 1), round(many.cpu_seconds, 1)],
        "best_decode_step_ms": [round(one.decode_step_ms, 1), round(many.decode_step_ms, 1)],
    }
    print(json.dumps(found, indent=2))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    is_equal = (one.greedy, one.seeded) == (many.greedy, many.seeded)
    is_small = options.tp_size != 2 or max(found["weight_share"]) < MAX_SHARE
    return 0 if is_equal and is_small else 1


if __name__ == "__main__":
    # Started processes look for what they run under its real name.
    sys.exit(importlib.import_module("benchmarks.tensor_parallel").main())
