"""Many copies as columns of numbers, so that thousands of them cost microseconds.

``Copies`` is a sequence of ``CopyOp`` to whoever looks at single ones; connectors and the planner
work on its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from isthmus.kvtransfer.interface import CopyOp

Rows = npt.NDArray[np.int64]

_FIRST = np.array([True])


class Copies(Sequence[CopyOp]):
    """Immutable. ``rows`` is [n, 3]: source offset, target offset, bytes."""

    __slots__ = ("num_bytes", "rows")

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.rows.setflags(write=False)
        self.num_bytes = int(rows[:, 2].sum())

    @classmethod
    def of(cls, ops: Sequence[CopyOp]) -> Copies:
        """``ops`` itself when they are rows already."""
        if isinstance(ops, Copies):
            return ops
        rows = [(op.source_offset, op.target_offset, op.num_bytes) for op in ops]
        return cls(np.array(rows, dtype=np.int64).reshape(len(rows), 3))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> CopyOp: ...

    @overload
    def __getitem__(self, index: slice) -> Copies: ...

    def __getitem__(self, index: int | slice) -> CopyOp | Copies:
        if isinstance(index, slice):
            return Copies(self.rows[index].copy())
        return CopyOp(*self.rows[index].tolist())

    def __repr__(self) -> str:
        return f"Copies({len(self)} of {self.num_bytes} bytes)"


def joined(source: Rows, target: Rows, num_bytes: Rows) -> Copies:
    """Copies of these columns in their order; neighbours on both sides become one."""
    if not len(source):
        return Copies(np.empty((0, 3), dtype=np.int64))
    follows = source[1:] == source[:-1] + num_bytes[:-1]
    follows &= target[1:] == target[:-1] + num_bytes[:-1]
    firsts = np.flatnonzero(np.concatenate((_FIRST, ~follows)))
    rows = np.empty((len(firsts), 3), dtype=np.int64)
    rows[:, 0] = source[firsts]
    rows[:, 1] = target[firsts]
    np.add.reduceat(num_bytes, firsts, out=rows[:, 2])
    return Copies(rows)
