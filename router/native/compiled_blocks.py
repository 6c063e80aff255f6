"""``blocks.Blocks`` compiled: about 50 bytes a block, and one call for all blocks of a prompt."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Sequence

from isthmus.common.ids import HASH_BYTES, BlockHash
from isthmus.router.blocks import Holders
from isthmus.router.native.binding import Library, compiled_library


class CompiledBlocks:
    def __init__(self, compiled: Library) -> None:
        self._library = compiled
        self._at = compiled.blocks_make(int.from_bytes(os.urandom(8), "little"))
        weakref.finalize(self, compiled.blocks_free, self._at)

    @classmethod
    def create(cls) -> CompiledBlocks | None:
        """None where it cannot be compiled: ``PlainBlocks`` is the same then, slower."""
        compiled = compiled_library()
        return cls(compiled) if compiled is not None else None

    def __len__(self) -> int:
        return self._library.blocks_size(self._at)

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return self._library.blocks_bytes(self._at)

    def held_by(self, slot: int) -> int:
        return self._library.blocks_held_by(self._at, slot)

    def store(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        joined = b"".join(hashes)
        self._library.blocks_store(self._at, slot, joined, _count(joined, hashes))

    def remove(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        joined = b"".join(hashes)
        self._library.blocks_remove(self._at, slot, joined, _count(joined, hashes))

    def clear(self, slot: int) -> None:
        self._library.blocks_clear(self._at, slot)

    def evict(self, count: int) -> None:
        self._library.blocks_evict(self._at, count)

    def depths(self, hashes: Sequence[BlockHash], depths: Holders, *, is_use: bool) -> None:
        joined = b"".join(hashes)
        count = _count(joined, hashes)
        self._library.blocks_depths(self._at, joined, count, is_use, depths.buffer_info()[0])

    def items(self) -> list[tuple[BlockHash, frozenset[int]]]:
        size, width = len(self), self._library.blocks_width(self._at)
        hashes, words = bytearray(size * HASH_BYTES), array("Q", bytes(8 * size * width))
        at = array("B", hashes)
        self._library.blocks_list(self._at, at.buffer_info()[0], words.buffer_info()[0])
        data = at.tobytes()
        return [
            (
                BlockHash(data[place * HASH_BYTES : (place + 1) * HASH_BYTES]),
                _members(words[place * width : (place + 1) * width]),
            )
            for place in range(size)
        ]


def _count(joined: bytes, hashes: Sequence[BlockHash]) -> int:
    count = len(joined) // HASH_BYTES
    assert count == len(hashes), "hashes of blocks have 16 bytes"
    return count


def _members(words: array[int]) -> frozenset[int]:
    """Of a set of holders."""
    bits = enumerate(bin(int.from_bytes(words.tobytes(), "little"))[:1:-1])
    return frozenset(slot for slot, bit in bits if bit == "1")
