"""Checksums of what lands in target blocks, computed on either side from its own memory.

A checksum covers what one write brings into one target block: ``[L, 2, G, tokens, D]`` in this
order, then the scales of a quantised block ``[L, 2, G, tokens]``, of the layers and heads that are
sent and the tokens the block holds, however either side cuts tokens into blocks. Slots behind the
last token are not covered: nothing reads them, and the source may still write there.

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
from isthmus.kvtransfer.plan import Side, Tokens, blocks_of, needed_from

Bytes = npt.NDArray[np.uint8]
Parts = tuple[Bytes, ...]
BlockReader = Callable[[BlockId], Parts]
"""Views of one block in this process's memory: the vectors [L, 2, G, B, D·bytes] and, where they
have some, their scales [L, 2, G, B, 4]."""


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
    return host_planes(host_bytes(region), layout, num_blocks)


def host_planes(memory: Bytes, layout: KvLayout, num_blocks: int) -> BlockReader:
    """Reads the blocks that ``memory`` begins with."""
    layers = memory[: num_blocks * layout.block_bytes].reshape(
        num_blocks, layout.num_layers, layout.layer_bytes
    )
    # Planes of vectors, then as many of scales: those of one kind are neighbours.
    parts: list[Bytes] = []
    for plane in layout.planes[:: layout.num_planes]:
        slots = layout.num_planes * layout.num_kv_heads * layout.block_size
        part = layers[:, :, plane.offset : plane.offset + slots * plane.vector_bytes]
        shape = (layout.num_planes, layout.num_kv_heads, layout.block_size, plane.vector_bytes)
        parts.append(part.reshape(num_blocks, layout.num_layers, *shape))
    return lambda block_id: tuple(part[block_id] for part in parts)


def block_checksums(
    read: BlockReader,
    side: Side,
    tokens: range,
    target_block_size: int,
    heads: range,
    layers: range,
    needed_from: Tokens | None = None,
) -> tuple[int, ...]:
    """Of the target blocks that hold ``tokens``, which begin with one of them; ``heads`` of the
    model and ``layers`` of what is read are those sent. ``side`` is the source's or the target's;
    ``needed_from`` [L] as the planner has it, of these layers."""
    own = slice(heads.start - side.layout.heads.start, heads.stop - side.layout.heads.start)
    numbers = np.arange(layers.start, layers.stop)
    checksums: list[int] = []
    for start in range(tokens.start, tokens.stop, target_block_size):
        end = start + target_block_size
        sent: slice | Tokens = slice(layers.start, layers.stop)
        if needed_from is not None:
            sent = numbers[needed_from < end]
        digest = xxhash.xxh3_64()
        for part in _content(read, side, range(start, min(end, tokens.stop)), own, sent):
            digest.update(part.data)
        checksums.append(digest.intdigest())
    return tuple(checksums)


def _content(
    read: BlockReader, side: Side, tokens: range, own: slice, layers: slice | Tokens
) -> list[Bytes]:
    """Each [L, 2, G, tokens, bytes], contiguous; a view where one block holds nothing else."""
    size = side.layout.block_size
    pieces: list[list[Bytes]] = []
    for index in blocks_of(tokens, size):
        block = read(side.block_ids[index - side.first_token // size])
        start, stop = max(tokens.start - index * size, 0), min(tokens.stop - index * size, size)
        pieces.append([part[layers, :, own, start:stop] for part in block])
    return [
        np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=3))
        for parts in zip(*pieces, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """What a chunk's checksums are of, as one rank's store holds it. It is data, so that the rank
    may be in another process: only there can its blocks be read."""

    note: Notification
    side: Side
    tokens: range
    heads: range
    target_block_size: int
    num_tokens: int  # of the prompt
    first_layer: int = 0  # that the blocks hold: staged ones have some layers only

    def seal(self, read: BlockReader) -> bytes:
        """The note, which has no checksums yet, with those of the source's blocks."""
        return self.note.checked(self._checksums(read)).encode()

    def count_corrupt(self, read: BlockReader) -> int:
        """How many target blocks are not what the note says."""
        pairs = zip(self.note.checksums, self._checksums(read), strict=True)
        return sum(expected != found for expected, found in pairs)

    def _checksums(self, read: BlockReader) -> tuple[int, ...]:
        size, layers, first = self.target_block_size, self.note.layers, self.first_layer
        needed = needed_from(self.side.layout, self.num_tokens, self.tokens.start, size)
        return block_checksums(
            *(read, self.side, self.tokens, size, self.heads),
            range(layers.start - first, layers.stop - first),
            None if needed is None else needed[layers.start : layers.stop],
        )
