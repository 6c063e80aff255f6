"""Which blocks of a prompt may be sent after a step. Pure.

::

    tokens    0 ……………………………… num_computed_tokens …… num_tokens
    blocks    ├─ final: full and computed ─┤ being filled │ empty
              └ first_block: earlier ones are already on the decode instance

A block is final once all of its tokens are computed; the last, partly filled one is final with the
prompt. Blocks that a prefix cache had are final after the first step like any other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks [first, stop) of the sequence; ``is_last`` when nothing follows."""

    first: int
    stop: int
    is_last: bool


def num_final_blocks(num_computed_tokens: int, num_tokens: int, block_size: int) -> int:
    if num_computed_tokens >= num_tokens:
        return -(-num_tokens // block_size)
    return num_computed_tokens // block_size


class ChunkFeed:
    """Hands out each block of one transfer once, in order: blocks of the target's size."""

    def __init__(self, num_tokens: int, block_size: int, first_block: int) -> None:
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._next_block = first_block
        self._num_blocks = num_final_blocks(num_tokens, num_tokens, block_size)

    def take(self, num_computed_tokens: int) -> BlockRange | None:
        """Blocks that became final; None when there are none to send."""
        stop = num_final_blocks(num_computed_tokens, self._num_tokens, self._block_size)
        if stop <= self._next_block:
            return None
        first, self._next_block = self._next_block, stop
        return BlockRange(first, stop, is_last=stop == self._num_blocks)
