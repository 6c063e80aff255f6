"""Ranks of one instance side by side: as threads of this process over gloo on loopback, or in other
processes (``isthmus.worker.ranks``, which tests/integration starts).

A step runs on all of them at once, as the leader's messages make it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from isthmus.common.config import ModelConfig
from isthmus.engine.models.loader import load_model
from isthmus.engine.models.shard import Split
from isthmus.engine.models.types import ForwardBatch, LanguageModel, ModelSpec
from isthmus.engine.tp_group import TorchGroup, join_store, open_group, serve_store

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
def tp_groups(size: int, timeout_s: float = TIMEOUT_S) -> Iterator[list[TorchGroup]]:
    """The groups of all ranks; each belongs to one thread at a time."""
    server = serve_store(HOST, size, timeout_s)

    def join(rank: int) -> TorchGroup:
        store = server if rank == 0 else join_store(HOST, server.port, size, timeout_s)
        return open_group(store, rank, size, device="cpu", host=HOST, timeout_s=timeout_s)

    yield on_ranks(size, join)


@dataclass
class RankedModel:
    """Implements ``LanguageModel`` over the models of all ranks, each with KV of its own.

    ``kv`` of ``forward`` is only looked at for its shape: rank r writes to ``kv_of[r]``.
    """

    models: list[LanguageModel]
    kv_of: list[torch.Tensor]

    @property
    def spec(self) -> ModelSpec:
        return self.models[0].spec

    def forward(self, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
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

    return RankedModel(on_ranks(len(groups), load), [])


def float32_config(path: Path) -> ModelConfig:
    return ModelConfig(path=str(path), dtype="float32")
