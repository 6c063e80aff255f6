"""How many layers of a running step have their KV in the store: told across threads without a lock.

::

    the step, or native code    KV of layer 0 ─ mark(1) ─ KV of layer 1 ─ mark(2) ─ … ─ mark(L)
    any other thread                          num_final_layers == 1 → blocks of layer 0 may be read

There is one object for each step. A step that fails, or that never runs, says for ever how far it
got: no later step can make what it did not compute look computed. There is one writer, the count
only grows, and it is stored behind the KV that it speaks of.
"""

from __future__ import annotations

import ctypes
from typing import Protocol


class LayerProgress(Protocol):
    """The reader's side."""

    @property
    def num_final_layers(self) -> int:
        """KV that the step writes to layers [0, this) is in the store and stays as it is."""
        ...


class LayerMarks(Protocol):
    """The step's side."""

    @property
    def address(self) -> int:
        """Where native code may store the count by itself, an int64; 0 where it cannot."""
        ...

    def mark(self, num_layers: int) -> None:
        """Layers [0, num_layers) are final, or will be once what was launched so far has run."""
        ...


class LayerCounter:
    """Both sides, where the KV is in host memory: an int64 that whoever computes stores to."""

    def __init__(self) -> None:
        self._cell = ctypes.c_int64(0)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._cell)

    @property
    def num_final_layers(self) -> int:
        return self._cell.value

    def mark(self, num_layers: int) -> None:
        self._cell.value = num_layers
