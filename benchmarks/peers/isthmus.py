"""Our own side: one mixed instance on all cores, with bf16 or int8 weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.cluster import MODEL_NAME, serve
from benchmarks.peers.base import Server, Setup, Unavailable


@dataclass(frozen=True, slots=True)
class Isthmus:
    name: str
    title: str
    weight_bytes: float
    flags: tuple[str, ...] = ()
    rival: str = ""
    is_split: bool = False

    def bytes_per_weight(self, setup: Setup) -> float:  # noqa: ARG002 - of every machine
        return self.weight_bytes

    def prepare(self, setup: Setup) -> None:
        """Nothing to do: it runs from this environment."""

    @contextmanager
    def serve(self, setup: Setup, stage: str) -> Iterator[Server]:  # noqa: ARG002 - one for both
        flags = (
            "--mixed", "1", "--dtype", "bfloat16", "--actuator", "process",
            "--set", f"mixed.engine.num_threads={setup.num_threads}", *self.flags,
        )  # fmt: skip
        with ExitStack() as stack:
            try:
                running = stack.enter_context(
                    serve(setup.model, *flags, ready_timeout_s=setup.ready_timeout_s)
                )
            except RuntimeError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise Unavailable(f"it did not start ({lines[-1][:300]})") from error
            yield Server(running.url, MODEL_NAME, running.pid, running.ready_s)


SIDES = (
    Isthmus("isthmus", "Isthmus bf16", 2.0),
    Isthmus("isthmus-int8", "Isthmus int8", 1.0, ("--set", "model.quantization=int8")),
)
