"""The memory in which KV is converted for peers that keep another dtype: a ring behind the blocks,
in the memory that is registered with the connector anyway.

The ring bounds what is converted and not yet sent. A write gets its room right before it is posted
and gives it back when it ends; without room it waits, with all that is queued behind it. This runs
on the connectors' threads. On the CPU no KV-sized memory is allocated for a write.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import STAGING_ALIGNMENT
from isthmus.kernels.kv_views import block_views
from isthmus.kvtransfer.checksums import Parts, host_planes
from isthmus.kvtransfer.conversion import Conversion
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.plan import Side, pieces


class QuantiseKv(Protocol):
    """As ``Kernels.quantise_kv``."""

    def __call__(
        self,
        x: torch.Tensor,
        dtype: torch.dtype,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Ring:
    """Room of so many bytes, handed out in one piece and taken back in any order.

    ::

        │ piece │ free │ piece │ piece │ free │      the first gap that is large enough is taken

    Nobody has more than half of it, unless in one piece: a write that does not end must not stop
    those to other peers.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._pieces: dict[int, tuple[int, str]] = {}  # start → (end, whose), by start

    def try_take(self, num_bytes: int, owner: str = "") -> int | None:
        """The start of a piece; None when there is no room now. ValueError when there never is."""
        size = -(-num_bytes // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        if size > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes are more than the ring's {self.num_bytes}")
        own = sum(end - start for start, (end, whose) in self._pieces.items() if whose == owner)
        if own and own + size > self.num_bytes // 2:
            return None
        start = self._gap(size)
        if start is not None:
            self._pieces[start] = (start + size, owner)
            self._pieces = dict(sorted(self._pieces.items()))
        return start

    def give_back(self, start: int) -> None:
        del self._pieces[start]

    @property
    def is_empty(self) -> bool:
        return not self._pieces

    def _gap(self, size: int) -> int | None:
        free_from = 0
        for start, (end, _) in self._pieces.items():
            if start - free_from >= size:
                return free_from
            free_from = end
        return free_from if self.num_bytes - free_from >= size else None


class Converter:
    """Of one store, whose ``memory`` (uint8) holds its blocks and, behind them, the ring."""

    def __init__(
        self, memory: torch.Tensor, layout: KvLayout, num_blocks: int, quantise: QuantiseKv
    ) -> None:
        self._lock = threading.Lock()  # of the ring
        self._memory = memory
        self._quantise = quantise
        self._vectors, _ = block_views(memory, layout, num_blocks)
        end = num_blocks * layout.block_bytes
        self._first_byte = end + -(memory.data_ptr() + end) % STAGING_ALIGNMENT
        room = max(0, memory.numel() - self._first_byte)
        self._ring = Ring(room // STAGING_ALIGNMENT * STAGING_ALIGNMENT)
        # Steps of the engine are in the device's own queue; conversions do not wait for them.
        self._stream: torch.cuda.Stream | None = None
        if memory.is_cuda:
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Of the ring."""
        return self._ring.num_bytes

    @property
    def is_idle(self) -> bool:
        return self._ring.is_empty

    def stage(self, conversion: Conversion, owner: str = "") -> StagedBlocks:
        """``owner`` is the peer whose write it is."""
        return StagedBlocks(self, conversion, owner)

    def try_fill(self, conversion: Conversion, owner: str) -> int | None:
        """Converts into the ring; where that begins, in bytes of the memory. None without room.
        ValueError when there is never room for so much."""
        with self._lock:
            start = self._ring.try_take(conversion.num_bytes, owner)
        if start is None:
            return None
        first_byte = self._first_byte + start
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._convert(conversion, self.room(first_byte, conversion))
            if self._stream is not None:
                self._stream.synchronize()
        except BaseException:
            self.give_back(first_byte)
            raise
        return first_byte

    def give_back(self, first_byte: int) -> None:
        with self._lock:
            self._ring.give_back(first_byte - self._first_byte)

    def room(self, first_byte: int, conversion: Conversion) -> torch.Tensor:
        return self._memory[first_byte : first_byte + conversion.num_bytes]

    @torch.inference_mode()
    def _convert(self, conversion: Conversion, room: torch.Tensor) -> None:
        source, staged, layers = conversion.source, conversion.side, conversion.layers
        layout = _with_layers(conversion)
        vectors, scales = block_views(room, layout, conversion.num_blocks)
        heads, first = conversion.heads, source.layout.heads.start
        own, which = (
            slice(heads.start - first, heads.stop - first),
            slice(layers.start, layers.stop),
        )
        starts, lengths = pieces(source, staged, conversion.tokens)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            if (start // layout.block_size + 1) * layout.block_size <= conversion.first_needed:
                continue
            from_block, from_slot = _place(source, start)
            to_block, to_slot = _place(staged, start)
            x = self._vectors[from_block, which, :, own, from_slot : from_slot + length]
            at = (to_block, slice(None), slice(None), own, slice(to_slot, to_slot + length))
            if scales is None:
                vectors[at].copy_(x)
            else:
                self._quantise(x, vectors.dtype, (vectors[at], scales[at]))


@dataclass(slots=True, eq=False)
class StagedBlocks:
    """What one write converts; implements the driver's ``Stage``."""

    converter: Converter
    conversion: Conversion
    owner: str
    _first_byte: int | None = None

    def try_fill(self, copies: Copies) -> Copies | None:
        first_byte = self.converter.try_fill(self.conversion, self.owner)
        if first_byte is None:
            return None
        self._first_byte = first_byte
        rows = copies.rows.copy()
        rows[:, 0] += first_byte
        return Copies(rows)

    def release(self) -> None:
        if self._first_byte is not None:
            self.converter.give_back(self._first_byte)
            self._first_byte = None

    def read(self, block_id: BlockId) -> Parts:
        """A ``BlockReader`` of what is staged, in host memory."""
        assert self._first_byte is not None, "nothing is staged"
        room = self.converter.room(self._first_byte, self.conversion).numpy()
        return host_planes(room, _with_layers(self.conversion), self.conversion.num_blocks)(
            block_id
        )


def _with_layers(conversion: Conversion) -> KvLayout:
    return replace(conversion.staged, num_layers=len(conversion.layers), windows=())


def _place(side: Side, token: int) -> tuple[BlockId, int]:
    index, slot = divmod(token - side.first_token, side.layout.block_size)
    return side.block_ids[index], slot
