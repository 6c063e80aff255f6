"""What of one ticket has arrived over all its routes, and what a chunk may claim beside that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import Checksum, TransferTicket
from isthmus.kvtransfer.checksums import ChunkContent
from isthmus.kvtransfer.coverage import Bools, Coverage
from isthmus.kvtransfer.notification import Notification
from isthmus.kvtransfer.plan import Side, needed_from
from isthmus.kvtransfer.routes import Ranks, Route


class Arrivals:
    """Of one receive session."""

    def __init__(self, ticket: TransferTicket, routes: Sequence[Route]) -> None:
        self.layout: KvLayout = routes[0].target
        self.num_chunks: int | None = None  # on every route, once it was told
        self._ticket = ticket
        moved = self._moved()
        self._by_ranks = {
            route.ranks: Coverage(route, ticket.num_blocks, moved) for route in routes
        }

    @property
    def num_leading(self) -> int:
        """So many of the first target blocks are whole on every route."""
        return min(arrived.num_leading for arrived in self._by_ranks.values())

    @property
    def has_all_chunks(self) -> bool:
        return all(len(arrived.chunks) == self.num_chunks for arrived in self._by_ranks.values())

    @property
    def is_whole(self) -> bool:
        return all(arrived.is_whole for arrived in self._by_ranks.values())

    @property
    def num_missing(self) -> int:
        """Blocks of which a layer has not come over some route."""
        routes = self._by_ranks.values()
        indices = range(self._ticket.num_blocks)
        return sum(not all(arrived.has(index) for arrived in routes) for index in indices)

    def has_chunk(self, note: Notification, ranks: Ranks) -> bool:
        arrived = self._by_ranks.get(ranks)
        return arrived is not None and note.chunk in arrived.chunks

    def violation(self, note: Notification, ranks: Ranks) -> str | None:
        """What the chunk claims beside the ticket, the layout or earlier chunks of its route."""
        arrived, ticket = self._by_ranks.get(ranks), self._ticket
        if arrived is None:
            return "no route has these ranks"
        last_block = note.first_block + note.num_blocks
        if note.num_blocks < 1 or last_block > ticket.num_blocks:
            return f"blocks [{note.first_block}, {last_block}) of {ticket.num_blocks}"
        if not note.layer_first <= note.layer_last < self.layout.num_layers:
            return f"layers [{note.layer_first}, {note.layer_last}] of {self.layout.num_layers}"
        if self.num_chunks is not None and note.chunk >= self.num_chunks:
            return f"only {self.num_chunks} chunks were announced"
        if bool(note.checksums) is not (ticket.checksum is not Checksum.NONE):
            return f"{len(note.checksums)} checksums, the ticket says {ticket.checksum.value}"
        return "writes blocks that another chunk wrote" if arrived.overlaps(note) else None

    def content_of(self, note: Notification, ranks: Ranks) -> ChunkContent | None:
        """What has to be compared before the chunk counts; None when nothing has to."""
        if not note.checksums or self.has_chunk(note, ranks) or self.violation(note, ranks):
            return None
        route, ticket, size = self._by_ranks[ranks].route, self._ticket, self.layout.block_size
        tokens = ticket.tokens_of(note.first_block, note.first_block + note.num_blocks, size)
        side = Side(route.target, ticket.target_block_ids, ticket.first_block * size)
        return ChunkContent(note, side, tokens, route.heads, size, ticket.num_tokens)

    def cover(self, note: Notification, ranks: Ranks) -> int:
        """Of a chunk without a violation; returns the bytes that came with it."""
        return self._by_ranks[ranks].cover(note)

    def contradiction(self, num_chunks: int) -> str | None:
        """Why there cannot be so many chunks."""
        chunks = {chunk for arrived in self._by_ranks.values() for chunk in arrived.chunks}
        beyond = [chunk for chunk in chunks if chunk >= num_chunks]
        if not beyond and self.num_chunks in (None, num_chunks):
            return None
        return f"{num_chunks} chunks announced, but {self.num_chunks or max(beyond) + 1} known"

    def _moved(self) -> Bools | None:
        """[blocks, L]: what of the target blocks comes; None = all."""
        ticket, size = self._ticket, self.layout.block_size
        first = ticket.first_block
        needed = needed_from(self.layout, ticket.num_tokens, first * size, size)
        if needed is None:
            return None
        ends = np.arange(first + 1, first + ticket.num_blocks + 1) * size
        moved: Bools = ends[:, None] > needed
        return moved
