"""Who this instance exchanges KV with: one peer an instance id, at its newest epoch.

A peer has ranks, and so has this instance: those meet that have KV for each other (``routes``). The
table and the connectors' own lists change together, under a lock for each instance: a peer is there
with all its ranks or not at all, and one that does not answer keeps no other waiting. An epoch that
has been replaced stays refused even after its successor is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

from isthmus.common.errors import HandshakeError, IsthmusError, StaleEpochError
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import Checksum, RankEndpoint, TransferOffer
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.handshake import check_epoch, check_offer
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.negotiation import negotiate
from isthmus.kvtransfer.rank_port import RankPort
from isthmus.kvtransfer.routes import Ranks, Route, meeting_ranks, routes_between

# Instances whose newest epoch is known, of those that have left: whoever left before so many others
# is not known to have been replaced any more.
MAX_REMEMBERED = 4096

# Called before a peer leaves the table: (instance, why, whether its process has surely ended).
PeerLeaves = Callable[[InstanceId, IsthmusError, bool], None]


@dataclass(frozen=True, slots=True)
class Peer:
    ref: InstanceRef
    ranks: tuple[RankEndpoint, ...]
    names: Mapping[Ranks, PeerName]  # (our rank, its rank) → its rank, as our rank's connector says
    connector: str  # of every transfer between the two, as is
    checksum: Checksum

    @property
    def layouts(self) -> tuple[KvLayout, ...]:
        return tuple(rank.layout for rank in self.ranks)

    def routes_to(self, ours: Sequence[KvLayout]) -> tuple[Route, ...]:
        """By which its KV comes to the ranks of this instance."""
        return routes_between(self.layouts, ours)

    def routes_from(self, ours: Sequence[KvLayout]) -> dict[Route, PeerName]:
        """By which KV of this instance's ranks goes to it, with whom to write to."""
        return {route: self.names[route.ranks] for route in routes_between(ours, self.layouts)}


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class PeerTable:
    def __init__(
        self,
        ours: TransferOffer,
        ports: Sequence[RankPort],
        timeout_ms: int,
        on_leave: PeerLeaves,
    ) -> None:
        """``ports`` are of this instance's ranks, in their order."""
        self._ours = ours
        self._layouts = tuple(rank.layout for rank in ours.ranks)
        self._ports = ports
        self._timeout_ms = timeout_ms
        self._on_leave = on_leave
        self._by_id: dict[InstanceId, Peer] = {}
        self._by_name: dict[tuple[int, PeerName], tuple[Peer, int]] = {}
        self._newest: dict[InstanceId, InstanceRef] = {}  # met last is last
        self._turns: dict[InstanceId, _Turn] = {}

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._by_id.values())

    def find(self, ref: InstanceRef) -> Peer | None:
        """The peer of exactly this epoch."""
        peer = self._by_id.get(ref.instance_id)
        return peer if peer is not None and peer.ref.epoch == ref.epoch else None

    def connectors(self) -> dict[InstanceId, str]:
        """What KV goes over, peer by peer."""
        return {instance_id: peer.connector for instance_id, peer in self._by_id.items()}

    def bytes_per_s(self) -> dict[InstanceId, float]:
        """What goes to each peer in a second, as measured; peers without a measurement are left
        out. Ranks send side by side and are alike: those of which nothing is known count as the
        mean of the others."""
        rates: dict[InstanceId, float] = {}
        for peer in self:
            known: dict[int, float] = {}
            for (rank, _), name in peer.names.items():
                rate = self._ports[rank].bytes_per_s(name)
                if rate is not None:
                    known[rank] = max(rate, known.get(rank, 0.0))
            if known:
                num_ranks = len({rank for rank, _ in peer.names})
                rates[peer.ref.instance_id] = sum(known.values()) / len(known) * num_ranks
        return rates

    def rank_of(self, name: PeerName, our_rank: int, ref: InstanceRef) -> int | None:
        """Which rank of exactly this instance and epoch it is that ``name`` sends from, as our
        rank's connector says; None when it is of none."""
        peer, rank = self._by_name.get((our_rank, name), (None, 0))
        return rank if peer is not None and peer is self.find(ref) else None

    def check_epoch(self, ref: InstanceRef) -> None:
        """Raises StaleEpochError when a newer self of ``ref`` has been met."""
        check_epoch(self._newest.get(ref.instance_id), ref)

    async def meet(self, offer: TransferOffer, check: Callable[[TransferOffer], None]) -> None:
        """Makes the offering instance a peer; a second offer of the same epoch changes nothing.
        ``check`` raises LayoutMismatchError when KV cannot go the way that it is to go.

        Raises HandshakeError, LayoutMismatchError or StaleEpochError and leaves no trace then,
        but that a newer epoch always ends its predecessor.
        """
        check_offer(self._ours, offer)
        connector = negotiate(self._ours, offer)
        check(offer)
        ref = offer.instance
        async with self._turn(ref.instance_id):
            self.check_epoch(ref)
            known = self.find(ref)
            if known is not None:
                self._check_same_memory(known, offer)
                return
            replaced = StaleEpochError(
                f"{ref.instance_id} restarted as epoch {ref.epoch}",
                stage="transfer",
                instance_id=ref.instance_id,
            )
            # No proof that the older process has ended: a stopped one may yet wake up and write.
            await self._drop(ref.instance_id, replaced, is_gone=False)
            checksum = offer.checksum if offer.checksum is self._ours.checksum else Checksum.NONE
            names = await self._add_all(offer, connector)
            peer = Peer(ref, offer.ranks, names, connector, checksum)
            self._by_id[ref.instance_id] = peer
            for (ours, theirs), name in peer.names.items():
                self._by_name[ours, name] = peer, theirs
            self._remember(ref)

    @asynccontextmanager
    async def _turn(self, instance_id: InstanceId) -> AsyncIterator[None]:
        """One at a time changes an instance; nothing of it stays when nobody does."""
        turn = self._turns.setdefault(instance_id, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._turns[instance_id]

    def _remember(self, ref: InstanceRef) -> None:
        self._newest.pop(ref.instance_id, None)
        self._newest[ref.instance_id] = ref
        left = (name for name in self._newest if name not in self._by_id)
        for name in [*islice(left, max(0, len(self._newest) - MAX_REMEMBERED))]:
            del self._newest[name]

    async def forget(self, instance_id: InstanceId, error: IsthmusError, is_gone: bool) -> None:
        self._on_leave(instance_id, error, is_gone)  # at once, whatever holds the lock
        async with self._turn(instance_id):
            await self._drop(instance_id, error, is_gone)

    async def _drop(self, instance_id: InstanceId, error: IsthmusError, is_gone: bool) -> None:
        self._on_leave(instance_id, error, is_gone)
        peer = self._by_id.pop(instance_id, None)
        if peer is not None:
            for (ours, _), name in peer.names.items():
                del self._by_name[ours, name]
            await self._remove(peer.names)

    async def _add_all(self, offer: TransferOffer, connector: str) -> dict[Ranks, PeerName]:
        """All pairs of ranks that have KV for each other, or none."""
        pairs = meeting_ranks(self._layouts, [rank.layout for rank in offer.ranks])
        adding = [
            asyncio.ensure_future(self._add(self._ports[ours], offer, theirs, connector))
            for ours, theirs in pairs
        ]
        try:
            names = await asyncio.gather(*adding)
        except BaseException:
            for addition in adding:
                addition.cancel()
            ended = await asyncio.gather(*adding, return_exceptions=True)
            await self._remove(
                {pair: n for pair, n in zip(pairs, ended, strict=True) if isinstance(n, str)}
            )
            raise
        return dict(zip(pairs, names, strict=True))

    async def _add(
        self, port: RankPort, offer: TransferOffer, rank: int, connector: str
    ) -> PeerName:
        ref = offer.instance
        try:
            return await port.add_peer(offer.ranks[rank], connector, self._timeout_ms / 1000)
        except TimeoutError as error:
            raise HandshakeError(
                f"{ref.instance_id} did not become a peer over {connector} within "
                f"{self._timeout_ms} ms",
                stage="handshake",
                instance_id=ref.instance_id,
            ) from error

    async def _remove(self, names: Mapping[Ranks, PeerName]) -> None:
        timeout_s = self._timeout_ms / 1000
        await asyncio.gather(
            *(self._ports[ours].remove_peer(name, timeout_s) for (ours, _), name in names.items())
        )

    @staticmethod
    def _check_same_memory(known: Peer, offer: TransferOffer) -> None:
        if known.ranks != offer.ranks:
            raise HandshakeError(
                f"{known.ref.instance_id} offers other memory under the same epoch "
                f"{known.ref.epoch}",
                stage="handshake",
                instance_id=known.ref.instance_id,
            )
