"""Which copies are measured: ``count`` pieces of one size, from and to places all over two pools.

A single piece, and pieces that follow each other on both sides, are what a planner makes of them:
one copy. Scattered pieces never touch: each is in a slot of twice its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.common.errors import ConfigError
from isthmus.kvtransfer.copies import Copies

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Case:
    """``piece_bytes`` × ``count`` bytes are moved."""

    piece_bytes: int
    count: int

    @property
    def num_bytes(self) -> int:
        return self.piece_bytes * self.count

    @property
    def name(self) -> str:
        return f"{self.count} × {size_text(self.piece_bytes)}"

    def plans(self, pool_bytes: int) -> Iterator[Copies]:
        """Endless; each plan is of other places, the same ones for everyone who asks."""
        random = np.random.default_rng((self.piece_bytes, self.count))
        stride = self.piece_bytes * (2 if self.count > 1 else 1)
        num_slots = pool_bytes // stride
        while True:
            rows = np.empty((self.count, 3), dtype=np.int64)
            rows[:, 0], rows[:, 1] = (
                random.permutation(num_slots)[: self.count] * stride for _ in range(2)
            )
            rows[:, 2] = self.piece_bytes
            yield Copies(rows)

    def everything(self, pool_bytes: int) -> Copies:
        """All pieces of the pool, to the same places."""
        rows = np.empty((pool_bytes // self.piece_bytes, 3), dtype=np.int64)
        rows[:, 0] = rows[:, 1] = np.arange(len(rows)) * self.piece_bytes
        rows[:, 2] = self.piece_bytes
        return Copies(rows)


def cases_of(sizes: Sequence[str], counts: Sequence[int], pool_bytes: int) -> tuple[Case, ...]:
    """Each size with each count that fits into the pools. Raises ConfigError when none does."""
    every = [Case(parse_size(size), count) for size in sizes for count in counts]
    fitting = tuple(
        case for case in every if case.num_bytes * (2 if case.count > 1 else 1) <= pool_bytes
    )
    if not fitting:
        raise ConfigError(
            f"no size fits into a pool of {size_text(pool_bytes)}: raise --pool", stage="bench"
        )
    return fitting


def parse_size(text: str) -> int:
    """Bytes of ``16KiB``, ``1MiB``, ``4096``. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)\s*(KiB|MiB|GiB|)", text.strip())
    if found is None or int(found[1]) == 0:
        raise ConfigError(f"not a size: '{text}'; write 4096, 16KiB or 1MiB", stage="bench")
    return int(found[1]) * _UNITS[found[2]]


def size_text(num_bytes: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]} {unit}"
    return f"{num_bytes} B"
