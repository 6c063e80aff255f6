"""What has arrived of one transfer over one route: a rectangle of blocks × layers, and the chunks.

Every part of the rectangle is covered once. Blocks mostly arrive in order, so the number of leading
blocks that are whole is kept: asking whether something is missing costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.kvtransfer.notification import Notification
from isthmus.kvtransfer.routes import Route

Bools = NDArray[np.bool_]


class Coverage:
    """Belongs to a receive session."""

    def __init__(self, route: Route, num_blocks: int, moved: Bools | None = None) -> None:
        """``moved`` [blocks, L]: which layers of them come at all, where it is not all: what nobody
        will look at is covered by notifications, but not sent."""
        self.route = route
        self._moved = moved
        self.chunks: set[int] = set()
        self.num_leading = 0
        """So many of the first target blocks are whole."""
        self._all_layers = (1 << route.target.num_layers) - 1
        self._present = [0] * num_blocks  # per target block, one bit a layer

    @property
    def is_whole(self) -> bool:
        return self.num_leading == len(self._present)

    def has(self, index: int) -> bool:
        """True when all layers of a target block are there."""
        return self._present[index] == self._all_layers

    def overlaps(self, note: Notification) -> bool:
        """True when some of what the chunk covers, which is within the ticket, is there already."""
        layers = _layer_bits(note)
        blocks = self._present[note.first_block : note.first_block + note.num_blocks]
        return any(present & layers for present in blocks)

    def cover(self, note: Notification) -> int:
        """Returns the bytes that came with the chunk."""
        self.chunks.add(note.chunk)
        layers = _layer_bits(note)
        for index in range(note.first_block, note.first_block + note.num_blocks):
            self._present[index] |= layers
        while not self.is_whole and self.has(self.num_leading):
            self.num_leading += 1
        return self._num_moved(note) * self.route.layer_bytes

    def _num_moved(self, note: Notification) -> int:
        """Layers of blocks that came with the chunk."""
        if self._moved is None:
            return note.num_blocks * len(note.layers)
        blocks = self._moved[note.first_block : note.first_block + note.num_blocks]
        return int(blocks[:, note.layer_first : note.layer_last + 1].sum())


def _layer_bits(note: Notification) -> int:
    return (1 << (note.layer_last + 1)) - (1 << note.layer_first)
