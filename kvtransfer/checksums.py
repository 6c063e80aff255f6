"""Checksums of what lands in target blocks, computed on either side from its own memory.

A checksum covers what one write brings into one target block: ``[L, 2, G, tokens, D]`` in this
order, of the layers and heads that are sent and the tokens the block holds, however either side
cuts tokens into blocks. Slots behind the last token are not covered: nothing reads them, and the
source may still write there.

xxh3 (64 bits) finds any damage by accident; it is no protection against an attacker.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from isthmus.common.config import TransferConfig
from isthmus.common.errors import ConfigError
from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import Checksum
from isthmus.kvtransfer.interface import MemoryRegion
from isthmus.kvtransfer.notification import Notification
from isthmus.kvtransfer.plan import Side, blocks_of

Bytes = npt.NDArray[np.uint8]
BlockReader = Callable[[BlockId], Bytes]
"""A view of one block in this process's memory: [L, 2, G, B, D·bytes]."""


def offered_checksum(config: TransferConfig, region: MemoryRegion) -> Checksum:
    """What this side can compute and may. Raises ConfigError when it may but cannot."""
    if config.checksum == "none":
        return Checksum.NONE
    if region.device == "cpu":
        return Checksum.XXH3
    if config.checksum == "auto":
        return Checksum.NONE
    raise ConfigError(
        f"transfer.checksum: xxh3 needs KV in host memory, here it is on {region.device}",
        stage="start",
    )


def host_bytes(region: MemoryRegion) -> Bytes:
    """A view of the region, which must be in host memory and stay there while it is in use."""
    flat = (ctypes.c_uint8 * region.num_bytes).from_address(region.base_address)
    return np.frombuffer(memoryview(flat), dtype=np.uint8)


def host_reader(region: MemoryRegion, layout: KvLayout, num_blocks: int) -> BlockReader:
    """Reads blocks where they are."""
    store = host_bytes(region)[: num_blocks * layout.block_bytes].reshape(
        num_blocks,
        layout.num_layers,
        layout.num_planes,
        layout.num_kv_heads,
        layout.block_size,
        layout.vector_bytes,
    )
    return lambda block_id: store[block_id]


def block_checksums(
    read: BlockReader,
    side: Side,
    tokens: range,
    target_block_size: int,
    heads: range,
    layers: range,
) -> tuple[int, ...]:
    """Of the target blocks that hold ``tokens``, which begin with one of them; ``heads`` and
    ``layers`` of the model are those sent. ``side`` is the source's or the target's."""
    own = slice(heads.start - side.layout.heads.start, heads.stop - side.layout.heads.start)
    return tuple(
        xxhash.xxh3_64_intdigest(
            _content(
                read, side, range(start, min(start + target_block_size, tokens.stop)), own, layers
            ).data
        )
        for start in range(tokens.start, tokens.stop, target_block_size)
    )


def _content(read: BlockReader, side: Side, tokens: range, own: slice, layers: range) -> Bytes:
    """[L, 2, G, tokens, D·bytes], contiguous; a view where one block holds nothing else."""
    size = side.layout.block_size
    pieces = []
    for index in blocks_of(tokens, size):
        block = read(side.block_ids[index - side.first_token // size])
        start, stop = max(tokens.start - index * size, 0), min(tokens.stop - index * size, size)
        pieces.append(block[layers.start : layers.stop, :, own, start:stop])
    return np.ascontiguousarray(pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=3))


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """What a chunk's checksums are of, as one rank's store holds it. It is data, so that the rank
    may be in another process: only there can its blocks be read."""

    note: Notification
    side: Side
    tokens: range
    heads: range
    target_block_size: int

    def seal(self, read: BlockReader) -> bytes:
        """The note, which has no checksums yet, with those of the source's blocks."""
        return self.note.checked(self._checksums(read)).encode()

    def count_corrupt(self, read: BlockReader) -> int:
        """How many target blocks are not what the note says."""
        pairs = zip(self.note.checksums, self._checksums(read), strict=True)
        return sum(expected != found for expected, found in pairs)

    def _checksums(self, read: BlockReader) -> tuple[int, ...]:
        size, layers = self.target_block_size, self.note.layers
        return block_checksums(read, self.side, self.tokens, size, self.heads, layers)
