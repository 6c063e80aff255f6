"""What a two-sided write announces: where each of its bytes goes, as the target takes it from the
wire and checks it."""

from __future__ import annotations

import numpy as np

from isthmus.kvtransfer.copies import Rows


def rows_to_wire(rows: Rows) -> bytes:
    """[n, 3] of little-endian int64."""
    return rows.astype("<i8").tobytes()


def rows_from_wire(data: bytes, num_bytes: int) -> Rows:
    """Raises ValueError when a row leaves this process's memory, which is of ``num_bytes``."""
    rows: Rows = np.frombuffer(data, dtype="<i8").astype(np.int64).reshape(-1, 3)
    targets, sizes = rows[:, 1], rows[:, 2]
    room = num_bytes - sizes
    if (sizes < 1).any() or (targets < 0).any() or (targets > room).any():
        raise ValueError("a write leaves this process's memory")
    return rows


def with_packed(rows: Rows, column: int) -> Rows:
    """The rows with places in a packed buffer, one after another, in one of the columns."""
    placed = rows.copy()
    placed[:, column] = rows[:, 2].cumsum() - rows[:, 2]
    return placed
