"""What is pushed, cut into writes: one for each chunk and route.

A chunk is some blocks of a ticket in some of their layers, the same on every route, and has one
number there. How large it is depends on the slowest link and on the memory in which KV is
converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from isthmus.common.ids import BlockId
from isthmus.common.transfer import Checksum, TransferTicket
from isthmus.kvtransfer.checksums import ChunkContent
from isthmus.kvtransfer.conversion import (
    Conversion,
    conversion_of,
    staged_copies,
    staged_layout,
)
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.notification import Flags, Notification
from isthmus.kvtransfer.plan import Side, needed_from, plan_copies
from isthmus.kvtransfer.routes import Route
from isthmus.kvtransfer.writes import Write, WriteOwner

# Bounds what a notification carries and how many copies one write is made of.
MAX_WRITE_BLOCKS = 512
_STAGED_WRITES = 4  # have room at a time, where KV is converted
# Of a write that is made while its step still runs. Within a machine a write is a copy by this
# process: a short one leaves memory and cores to the step, and lets other sessions' writes between.
MAX_EARLY_WRITE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class SourceStores:
    """Of each rank of this instance: its blocks, and what is behind them."""

    num_blocks: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Some layers of the blocks of a push. With ``is_ready`` they are still being computed: nothing
    of them is read before it says True, on the connector's thread."""

    layers: range
    is_ready: Callable[[], bool] | None = None


class Chunks:
    """Of one send session."""

    def __init__(
        self,
        ticket: TransferTicket,
        routes: Mapping[Route, PeerName],
        stores: SourceStores,
        expires_ns: int,
        max_write_bytes: Callable[[int, PeerName], int],
    ) -> None:
        """``max_write_bytes``: of one of our ranks to a peer, which depends on the link."""
        self._ticket = ticket
        self._routes = routes
        self._stores = stores
        self._expires_ns = expires_ns
        self._max_write_bytes = max_write_bytes
        self.count = 0

    def writes(
        self,
        owner: WriteOwner,
        indices: range,
        source_block_ids: Sequence[BlockId],
        first_token: int,
        part: LayerPart,
        *,
        is_last: bool,
    ) -> Iterator[Write]:
        """Of the ticket's blocks ``indices``; ``source_block_ids`` hold their tokens, and begin
        with ``first_token``. ``is_last``: nothing follows."""
        for chunk in self._cut(indices, part):
            note = self._note(chunk, part, is_last=is_last and chunk.stop == indices.stop)
            for route in self._routes:
                source = Side(route.source, source_block_ids, first_token)
                yield self._write(owner, route, note, source, part)

    def _cut(self, indices: range, part: LayerPart) -> Iterator[range]:
        most = min(
            self._max_write_bytes(route.source.tp_rank, name)
            for route, name in self._routes.items()
        )
        if part.is_ready is not None:
            most = min(most, MAX_EARLY_WRITE_BYTES)
        layer_bytes = next(iter(self._routes)).target.layer_bytes
        fitting = max(1, most // (len(part.layers) * layer_bytes))
        per_chunk = min(fitting, MAX_WRITE_BLOCKS)
        for route in self._routes:
            if route.is_converted:  # so many that several writes have room
                staged = staged_layout(route.source, route.target)
                room = self._stores.staging_bytes // _STAGED_WRITES
                per_chunk = min(per_chunk, max(1, room // (len(part.layers) * staged.layer_bytes)))
        for start in range(indices.start, indices.stop, per_chunk):
            yield range(start, min(start + per_chunk, indices.stop))

    def _note(self, chunk: range, part: LayerPart, *, is_last: bool) -> Notification:
        """Of the next chunk: it has the same number on every route."""
        note = Notification(
            transfer_id=self._ticket.transfer_id,
            chunk=self.count,
            layer_first=part.layers.start,
            layer_last=part.layers.stop - 1,
            first_block=chunk.start,
            num_blocks=len(chunk),
            flags=Flags.LAST if is_last else Flags.NONE,
        )
        self.count += 1
        return note

    def _write(
        self, owner: WriteOwner, route: Route, note: Notification, source: Side, part: LayerPart
    ) -> Write:
        ticket, size = self._ticket, route.target.block_size
        tokens = ticket.tokens_of(note.first_block, note.first_block + note.num_blocks, size)
        target = Side(route.target, ticket.target_block_ids, ticket.first_block * size)
        needed = needed_from(route.target, ticket.num_tokens, tokens.start, size)
        conversion: Conversion | None = None
        if route.is_converted:
            conversion = conversion_of(source, route, tokens, part.layers, needed)
            ops = staged_copies(conversion, target, needed)
        else:
            ops = plan_copies(source, target, tokens, needed, part.layers)
        return Write(
            rank=route.source.tp_rank,
            peer=self._routes[route],
            ops=ops,
            notification=note.encode(),
            content=self._content(note, source, tokens, route, conversion),
            expires_ns=self._expires_ns,
            owner=owner,
            is_ready=part.is_ready,
            conversion=conversion if ops else None,
        )

    def _content(
        self,
        note: Notification,
        source: Side,
        tokens: range,
        route: Route,
        conversion: Conversion | None,
    ) -> ChunkContent | None:
        """Of what is sent: of converted blocks, once they are."""
        if self._ticket.checksum is Checksum.NONE:
            return None
        side, first = (source, 0)
        if conversion is not None:
            side, first = conversion.side, conversion.layers.start
        size, num_tokens = route.target.block_size, self._ticket.num_tokens
        return ChunkContent(note, side, tokens, route.heads, size, num_tokens, first)
