"""Ranks of one instance side by side, over gloo on loopback: as threads of this process, or as
followers in processes of their own with the leader's engine here.
"""

from __future__ import annotations

import multiprocessing.process
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from isthmus.common.clock import SystemClock
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig, ModelConfig
from isthmus.common.ids import InstanceId
from isthmus.common.layer_progress import LayerMarks
from isthmus.engine.core import EngineCore
from isthmus.engine.models.loader import load_model
from isthmus.engine.models.shard import Split
from isthmus.engine.models.types import ForwardBatch, LanguageModel, ModelSpec
from isthmus.engine.tp_group import TorchGroup, join_store, open_group, serve_store
from isthmus.worker.rank import run_rank
from isthmus.worker.rank_link import Invitation
from isthmus.worker.ranks import Ranks
from isthmus.worker.role import WorkerArgs
from isthmus.worker.threads import run_in_thread
from tests.support.worker_process import forkserver

HOST = "127.0.0.1"
TIMEOUT_S = 20.0

ResultT = TypeVar("ResultT")


def on_ranks(size: int, work: Callable[[int], ResultT]) -> list[ResultT]:
    """``work(rank)`` of every rank in a thread of its own; raises the first rank's error."""
    results: dict[int, ResultT] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(size)]


@contextmanager
def tp_groups(
    size: int, timeout_s: float = TIMEOUT_S, host: str = HOST
) -> Iterator[list[TorchGroup]]:
    """The groups of all ranks; each belongs to one thread at a time."""
    server = serve_store(host, size, timeout_s)

    def join(rank: int) -> TorchGroup:
        store = server if rank == 0 else join_store(host, server.port, size, timeout_s)
        return open_group(store, rank, size, device="cpu", host=host, timeout_s=timeout_s)

    yield on_ranks(size, join)


@dataclass
class RankedModel:
    """Implements ``LanguageModel`` over the models of all ranks, each with KV of its own.

    ``kv`` of ``forward`` is only looked at for its shape: rank r writes to ``kv_of[r]``.
    """

    models: list[LanguageModel]
    kv_of: list[torch.Tensor] = field(default_factory=list)

    @property
    def spec(self) -> ModelSpec:
        return self.models[0].spec

    def forward(
        self,
        batch: ForwardBatch,
        kv: torch.Tensor,
        marks: LayerMarks | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert kv_scales is None
        if not self.kv_of:
            for model in self.models:
                shape = (*kv.shape[:3], model.spec.num_kv_heads, *kv.shape[4:])
                self.kv_of.append(torch.full(shape, float("nan"), dtype=kv.dtype))

        def run(rank: int) -> torch.Tensor:
            return self.models[rank].forward(batch, self.kv_of[rank])

        return on_ranks(len(self.models), run)[0]


def load_ranks(
    config: ModelConfig, groups: Sequence[TorchGroup], split: Split | None = None
) -> RankedModel:
    def load(rank: int) -> LanguageModel:
        return load_model(config, "cpu", 1, groups[rank], split)

    return RankedModel(on_ranks(len(groups), load))


def float32_config(path: Path) -> ModelConfig:
    return ModelConfig(path=str(path), dtype="float32")


def _run_follower(invitation: Invitation, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os._exit(run_rank(invitation))


class ForkLauncher:
    """Implements ``RankLauncher``: followers are forked from a process that has imported torch."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "followers.log"
        self.followers: list[multiprocessing.process.BaseProcess] = []

    def launch(self, invitation: Invitation) -> None:
        follower = forkserver.Process(target=_run_follower, args=(invitation, str(self.log)))
        follower.start()
        self.followers.append(follower)

    def problem(self) -> str:
        codes = [follower.exitcode for follower in self.followers]
        return "" if codes == [None] * len(codes) else f"followers ended with {codes}"

    def close(self) -> None:
        for follower in self.followers:
            follower.join(10)
            if follower.exitcode is None:
                follower.kill()
                follower.join()


@dataclass
class RankedEngine:
    core: EngineCore
    ranks: Ranks
    launcher: ForkLauncher


@asynccontextmanager
async def ranked_engine(
    model: ModelConfig, folder: Path, launcher: ForkLauncher | None = None, **engine: object
) -> AsyncIterator[RankedEngine]:
    """The leader's engine of a mixed instance whose followers are processes."""
    config = ClusterConfig.model_validate(
        {"model": model.model_dump(), "mixed": {"engine": engine}}
    )
    launcher = launcher or ForkLauncher(folder)
    ranks = Ranks(WorkerArgs(config, Role.MIXED, InstanceId("mixed-0"), ""), launcher)
    try:
        ranks.launch()
        core = await ranks.start(SystemClock())
        yield RankedEngine(core, ranks, launcher)
        core.close()
    finally:
        await run_in_thread(ranks.close)
