"""Who this instance exchanges KV with: one peer an instance id, at its newest epoch.

The table and the connector's own list change together, under one lock. An epoch that has been
replaced stays refused even after its successor is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.common.errors import HandshakeError, IsthmusError, StaleEpochError
from isthmus.common.ids import InstanceId
from isthmus.common.transfer import Checksum, RankEndpoint, TransferOffer
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.driver import ConnectorDriver
from isthmus.kvtransfer.handshake import check_epoch, check_offer
from isthmus.kvtransfer.interface import MemoryRegion, PeerName

# Called before a peer leaves the table: (instance, why, whether its process has surely ended).
PeerLeaves = Callable[[InstanceId, IsthmusError, bool], None]


@dataclass(frozen=True, slots=True)
class Peer:
    ref: InstanceRef
    rank: RankEndpoint
    name: PeerName
    checksum: Checksum  # of every transfer between the two


class PeerTable:
    def __init__(
        self, ours: TransferOffer, driver: ConnectorDriver, timeout_ms: int, on_leave: PeerLeaves
    ) -> None:
        self._ours = ours
        self._driver = driver
        self._timeout_ms = timeout_ms
        self._on_leave = on_leave
        self._by_id: dict[InstanceId, Peer] = {}
        self._by_name: dict[PeerName, Peer] = {}
        self._newest: dict[InstanceId, InstanceRef] = {}
        self._changing = asyncio.Lock()

    def find(self, ref: InstanceRef) -> Peer | None:
        """The peer of exactly this epoch."""
        peer = self._by_id.get(ref.instance_id)
        return peer if peer is not None and peer.ref.epoch == ref.epoch else None

    def speaks_for(self, name: PeerName, ref: InstanceRef) -> bool:
        """True when what ``name`` sends comes from exactly this instance and epoch."""
        peer = self._by_name.get(name)
        return peer is not None and peer is self.find(ref)

    def check_epoch(self, ref: InstanceRef) -> None:
        """Raises StaleEpochError when a newer self of ``ref`` has been met."""
        check_epoch(self._newest.get(ref.instance_id), ref)

    async def meet(self, offer: TransferOffer) -> None:
        """Makes the offering instance a peer; a second offer of the same epoch changes nothing.

        Raises HandshakeError, LayoutMismatchError or StaleEpochError and leaves no trace then,
        but that a newer epoch always ends its predecessor.
        """
        rank = check_offer(self._ours, offer)
        ref = offer.instance
        async with self._changing:
            self.check_epoch(ref)
            known = self.find(ref)
            if known is not None:
                self._check_same_memory(known, rank)
                return
            replaced = StaleEpochError(
                f"{ref.instance_id} restarted as epoch {ref.epoch}",
                stage="transfer",
                instance_id=ref.instance_id,
            )
            # No proof that the older process has ended: a stopped one may yet wake up and write.
            await self._drop(ref.instance_id, replaced, is_gone=False)
            checksum = offer.checksum if offer.checksum is self._ours.checksum else Checksum.NONE
            peer = Peer(ref, rank, await self._add(ref, rank), checksum)
            self._by_id[ref.instance_id] = self._by_name[peer.name] = peer
            self._newest[ref.instance_id] = ref

    async def forget(self, instance_id: InstanceId, error: IsthmusError, is_gone: bool) -> None:
        self._on_leave(instance_id, error, is_gone)  # at once, whatever holds the lock
        async with self._changing:
            await self._drop(instance_id, error, is_gone)

    async def _drop(self, instance_id: InstanceId, error: IsthmusError, is_gone: bool) -> None:
        self._on_leave(instance_id, error, is_gone)
        peer = self._by_id.pop(instance_id, None)
        if peer is not None:
            del self._by_name[peer.name]
            await self._driver.remove_peer(peer.name, self._timeout_ms / 1000)

    async def _add(self, ref: InstanceRef, rank: RankEndpoint) -> PeerName:
        region = MemoryRegion(rank.base_address, rank.num_bytes)
        try:
            return await self._driver.add_peer(rank.agent_metadata, region, self._timeout_ms / 1000)
        except TimeoutError as error:
            raise HandshakeError(
                f"{ref.instance_id} did not become a peer within {self._timeout_ms} ms",
                stage="handshake",
                instance_id=ref.instance_id,
            ) from error

    @staticmethod
    def _check_same_memory(known: Peer, rank: RankEndpoint) -> None:
        if known.rank != rank:
            raise HandshakeError(
                f"{known.ref.instance_id} offers other memory under the same epoch "
                f"{known.ref.epoch}",
                stage="handshake",
                instance_id=known.ref.instance_id,
            )
