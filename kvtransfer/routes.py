"""Which rank of the source writes to which rank of the target.

::

    4 KV heads   source, 2 ranks   [0 1] [2 3]           target, 4 ranks   [0] [1] [2] [3]
    routes       0 → 0: head 0     0 → 1: head 1         1 → 2: head 2     1 → 3: head 3

A route is one pair of ranks that share heads; pairs that share none never meet. All routes together
bring every head of every target rank exactly once, so a transfer is whole when each of them is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.common.kv_layout import KvLayout
from isthmus.kvtransfer.plan import shared_heads

Ranks = tuple[int, int]
"""Two ranks of two instances."""


@dataclass(frozen=True, slots=True)
class Route:
    """``heads`` of the model go from one rank's store to another's."""

    source: KvLayout
    target: KvLayout
    heads: range

    @property
    def ranks(self) -> Ranks:
        """Of the source and the target."""
        return self.source.tp_rank, self.target.tp_rank

    @property
    def is_converted(self) -> bool:
        return self.source.dtype != self.target.dtype

    @property
    def layer_bytes(self) -> int:
        """What it brings of one layer of one target block."""
        vector_bytes = sum(plane.vector_bytes for plane in self.target.planes)
        return len(self.heads) * self.target.block_size * vector_bytes


def routes_between(sources: Sequence[KvLayout], targets: Sequence[KvLayout]) -> tuple[Route, ...]:
    """Of all ranks of two instances, in their order. Their layouts fit (``check_plannable``)."""
    return tuple(
        Route(source, target, heads)
        for source in sources
        for target in targets
        if (heads := shared_heads(source, target))
    )


def meeting_ranks(ours: Sequence[KvLayout], theirs: Sequence[KvLayout]) -> tuple[Ranks, ...]:
    """(our rank, their rank) of every route between two instances, in either direction."""
    out = {route.ranks for route in routes_between(ours, theirs)}
    back = {route.ranks[::-1] for route in routes_between(theirs, ours)}
    return tuple(sorted(out | back))
