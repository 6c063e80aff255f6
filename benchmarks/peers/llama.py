"""llama.cpp's server, with BF16 and with Q8_0 weights.

It divides its cache among its slots and plans for all of them, so it is started once with one slot
for requests one at a time, and once with as many slots as requests come at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.cluster import OUT
from benchmarks.peers.base import Server, Setup, free_port, install, started
from benchmarks.peers.gguf_export import export_sample

FLAGS = {
    "alone": ("-np", "1", "-c", "4096"),
    # 64 slots of 320 tokens: a prompt, its output and a margin.
    "loaded": ("-np", "64", "-c", "20480"),
}


@dataclass(frozen=True, slots=True)
class Llama:
    name: str
    title: str
    weight_format: str
    weight_bytes: float
    rival: str
    is_split: bool = True

    def bytes_per_weight(self, setup: Setup) -> float:  # noqa: ARG002 - of every machine
        return self.weight_bytes

    def prepare(self, setup: Setup) -> None:
        install("llama_setup.sh", setup.venvs / "llama", setup)
        export_sample(OUT, self.weight_format)

    @contextmanager
    def serve(self, setup: Setup, stage: str) -> Iterator[Server]:
        port = free_port()
        threads = str(setup.num_threads)
        command = [
            str(setup.venvs / "llama" / "bin" / "llama-server"),
            "-m", str(OUT / f"sample-{self.weight_format}.gguf"), "--host", "127.0.0.1",
            "--port", str(port), "-t", threads, "-tb", threads, "--no-webui",
            # Prompts never come again: nothing to keep aside when a slot takes a new one.
            "--cache-ram", "0", *FLAGS[stage],
        ]  # fmt: skip
        with started(f"{self.name}-{stage}", command, "bench", port, setup) as server:
            yield server


SIDES = (
    Llama("llama-bf16", "llama.cpp BF16", "bf16", 2.0, "isthmus"),
    # 32 weights and their scale in 34 bytes.
    Llama("llama-q8_0", "llama.cpp Q8_0", "q8_0", 34 / 32, "isthmus-int8"),
)
