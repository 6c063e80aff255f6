"""What a process of an instance takes from its pool's configuration before anything computes."""

from __future__ import annotations

import os

import torch

from isthmus.common.config import PoolConfig


def prepare_process(pool: PoolConfig, rank: int = 0) -> None:
    """Cores and threads of this process."""
    cpus = cpus_of(pool, rank)
    if cpus:
        os.sched_setaffinity(0, cpus)
    torch.set_num_threads(pool.engine.num_threads)


def cpus_of(pool: PoolConfig, rank: int) -> list[int]:
    """A rank's own cores of the pool's where there are enough for each to have some, else all."""
    size = pool.engine.tp_size
    if len(pool.cpus) < size:
        return pool.cpus
    first, last = (len(pool.cpus) * r // size for r in (rank, rank + 1))
    return pool.cpus[first:last]
