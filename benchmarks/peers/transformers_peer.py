"""``transformers`` with its continuous batching, behind the smallest server that streams tokens.

Its own ``transformers serve`` takes text alone as a prompt, so it cannot be given the load of the
others, which is token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.peers.base import HERE, Server, Setup, free_port, install, started


@dataclass(frozen=True, slots=True)
class Transformers:
    name: str = "transformers"
    title: str = "transformers, continuous batching"
    rival: str = "isthmus"
    is_split: bool = False

    def bytes_per_weight(self, setup: Setup) -> float:
        return 4.0 if setup.peer_dtype == "float32" else 2.0

    def prepare(self, setup: Setup) -> None:
        install("transformers_setup.sh", setup.venvs / "transformers", setup)

    @contextmanager
    def serve(self, setup: Setup, stage: str) -> Iterator[Server]:  # noqa: ARG002 - one for both
        port = free_port()
        command = [
            str(setup.venvs / "transformers" / "bin" / "python"),
            str(HERE / "transformers_server.py"), "--model", str(setup.model), "--port", str(port),
            "--dtype", setup.peer_dtype, "--threads", str(setup.num_threads),
        ]  # fmt: skip
        env = {"HF_HUB_OFFLINE": "1"}
        with started("transformers", command, "bench", port, setup, env) as server:
            yield server


SIDES = (Transformers(),)
