"""Which parts of a prompt's KV may be sent, and when. Pure.

::

    tokens    0 ……………………………… num_computed_tokens …… num_tokens
    blocks    ├─ final: full and computed ─┤ being filled │ empty
              └ first_block: earlier ones are already on the decode instance

A block is final once all of its tokens are computed; the last, partly filled one is final with the
prompt. Blocks that a prefix cache had are final with the first step like any other.

The blocks that a step makes final become final layer by layer, and leave as a few pieces::

    step      layer 0 … 9 │ 10 … 19 │ 20 … 29 │ sample
    pieces                └ [0, 10) └ [10, 20)         └ [20, 30), when the step has landed

So what is still to be sent when a prompt is computed is one group of layers of its last chunk.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# A write of less costs more in descriptors and round trips than it gains by leaving early.
LEAST_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks [first, stop) of the sequence in some of their layers; ``is_last`` when nothing
    follows."""

    first: int
    stop: int
    layers: range
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """How the layers of a chunk are grouped. ``layers_per_push`` 0: as many as make a piece of
    LEAST_PIECE_BYTES; ``layer_bytes`` is that of one block."""

    num_layers: int
    layer_bytes: int
    layers_per_push: int = 0

    def groups(self, num_blocks: int) -> list[range]:
        """All layers in order; the last group is not larger than the others."""
        size = self.layers_per_push
        if not size:
            size = -(-LEAST_PIECE_BYTES // (num_blocks * self.layer_bytes))
        starts = range(0, self.num_layers, size)
        return [range(start, min(start + size, self.num_layers)) for start in starts]


def num_final_blocks(num_computed_tokens: int, num_tokens: int, block_size: int) -> int:
    if num_computed_tokens >= num_tokens:
        return -(-num_tokens // block_size)
    return num_computed_tokens // block_size


class ChunkFeed:
    """Hands out each layer of each block of one transfer once: blocks of the target's size, each
    layer's in order."""

    def __init__(
        self, num_tokens: int, block_size: int, first_block: int, layers: LayerSteps
    ) -> None:
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._next_block = first_block
        self._num_blocks = num_final_blocks(num_tokens, num_tokens, block_size)
        self._layers = layers
        self._waiting: deque[Piece] = deque()  # for their steps to land, oldest first

    def launch(self, num_tokens: int) -> list[Piece]:
        """A step has begun that computes the prompt up to ``num_tokens``: what may leave while it
        runs, each piece when the last of its layers is final."""
        stop = num_final_blocks(num_tokens, self._num_tokens, self._block_size)
        if stop <= self._next_block:
            return []
        first, self._next_block = self._next_block, stop
        *early, last = self._layers.groups(stop - first)
        is_last = stop == self._num_blocks
        self._waiting.append(Piece(first, stop, last, is_last))
        return [Piece(first, stop, layers) for layers in early]

    def land(self, num_computed_tokens: int) -> list[Piece]:
        """The step has ended well: what has to leave now, to the end of what is computed."""
        stop = num_final_blocks(num_computed_tokens, self._num_tokens, self._block_size)
        pieces = []
        while self._waiting and self._waiting[0].stop <= stop:
            pieces.append(self._waiting.popleft())
        if stop > self._next_block:  # of a step whose launch nobody told of
            layers = range(self._layers.num_layers)
            pieces.append(Piece(self._next_block, stop, layers, stop == self._num_blocks))
            self._next_block = stop
        return pieces
