"""Who holds which blocks, and in which order they were used: what the prefix index is made of.

``PlainBlocks`` says what is meant, and is what runs where nothing can be compiled;
``native.CompiledBlocks`` does the same to the last detail (which block is dropped next, too) in a
small part of the time and memory. Holders are *slots*, small numbers that the index gives out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Protocol, TypeAlias

from isthmus.common.ids import BlockHash

MAX_SHARED = 4_096

Holders: TypeAlias = "array[float]"
"""Leading blocks of a prompt by slot, and one entry more that is 0: nobody's."""


class Blocks(Protocol):
    def __len__(self) -> int: ...

    def held_by(self, slot: int) -> int:
        """How many."""
        ...

    def store(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        """They become the last ones used, parents (which come first) after their children."""
        ...

    def remove(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        """Those of them that it holds."""
        ...

    def clear(self, slot: int) -> None: ...

    def evict(self, count: int) -> None:
        """Of all holders, those used longest ago."""
        ...

    def depths(self, hashes: Sequence[BlockHash], depths: Holders, *, is_use: bool) -> None:
        """Writes into ``depths``, by slot, how many leading ones of ``hashes`` each holder has,
        where it has any. ``is_use``: as far as somebody has them, as if they were stored."""
        ...

    def items(self) -> list[tuple[BlockHash, frozenset[int]]]:
        """With their holders, used longest ago first."""
        ...


class PlainBlocks:
    """Holders of a block are a mask with one bit a slot, so that a lookup of a whole prompt is one
    dictionary access and one AND per block."""

    def __init__(self) -> None:
        # Least recently used first: a block that is used again is entered anew. (An OrderedDict
        # moves it in place, for 60 bytes a block and twice the time that it takes to enter one.)
        self._masks: dict[BlockHash, int] = {}
        self._held: dict[int, set[BlockHash]] = {}
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def held_by(self, slot: int) -> int:
        return len(self._held.get(slot, ()))

    def store(self, slot: int, hashes: Sequence[BlockHash]) -> None:
        masks, bit = self._masks, 1 << slot
        self._held.setdefault(slot, set()).update(hashes)
        # Parents come first, and should be dropped last.
        if masks.keys().isdisjoint(hashes):
            masks.update(dict.fromkeys(reversed(hashes), self._shared_mask(bit)))
            return
        # Few sets of holders, many blocks: what a set becomes is found out once.
        backwards = hashes[::-1]
        found = dict(zip(backwards, map(masks.get, backwards), strict=True))
        becomes = {mask: self._with(mask, bit) for mask in set(found.values())}
        deque(map(masks.pop, found, repeat(None)), maxlen=0)
        masks.update(zip(found, map(becomes.__getitem__, found.values()), strict=True))

    def remove(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        masks, bit, held = self._masks, 1 << slot, self._held.get(slot, set())
        known = held.intersection(hashes)
        held -= known
        for block_hash in known:
            mask = masks[block_hash]
            if mask == bit:
                del masks[block_hash]
            else:
                masks[block_hash] = self._shared_mask(mask ^ bit)

    def clear(self, slot: int) -> None:
        self.remove(slot, self._held.get(slot, set()).copy())

    def evict(self, count: int) -> None:
        for block_hash in [*islice(self._masks, count)]:
            for slot in _slots(self._masks.pop(block_hash)):
                self._held[slot].discard(block_hash)

    def depths(self, hashes: Sequence[BlockHash], depths: Holders, *, is_use: bool) -> None:
        masks = self._masks
        alive = masks.get(hashes[0], 0) if hashes else 0
        if not alive:
            return
        # Most blocks have the holders of the one before them: nothing to be done but to go on.
        for depth, mask in enumerate(map(masks.get, hashes)):
            if mask != alive:
                still = alive & mask if mask is not None else 0
                if still != alive:
                    for slot in _slots(alive ^ still):
                        depths[slot] = depth
                    alive = still
                    if not alive:
                        break
        else:
            depth = len(hashes)
            for slot in _slots(alive):
                depths[slot] = depth
        if is_use:
            for index in range(depth - 1, -1, -1):
                masks[hashes[index]] = masks.pop(hashes[index])

    def items(self) -> list[tuple[BlockHash, frozenset[int]]]:
        return [(block_hash, frozenset(_slots(mask))) for block_hash, mask in self._masks.items()]

    def _with(self, mask: int | None, bit: int) -> int:
        if mask is None:
            return self._shared_mask(bit)
        return mask if mask & bit else self._shared_mask(mask | bit)

    def _shared_mask(self, mask: int) -> int:
        """Its equal that others have too: there are millions of blocks and few sets of holders."""
        shared = self._shared
        if len(shared) > MAX_SHARED:
            shared.clear()
        return shared.setdefault(mask, mask)


def _slots(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
