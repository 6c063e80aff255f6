"""One rank of this instance as its TransferManager sees it: a store of KV, and the connectors that
are driven beside it.

::

    TransferManager ─┬─▶ LocalPort  ─▶ Drivers                the leader's own rank
                     ├─▶ RemotePort ═══▶ PortServer ─▶ LocalPort ─▶ …      a follower's process
                     └─▶ RemotePort ═══▶ …

The manager decides everything and a port does what it is told, so a session does not know which
process its blocks are in. A port that is lost takes its instance with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from isthmus.common.clock import Clock
from isthmus.common.config import TransferConfig
from isthmus.common.errors import HandshakeError
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import Checksum, RankEndpoint
from isthmus.kvtransfer.checksums import (
    BlockReader,
    ChunkContent,
    host_reader,
    offered_checksum,
)
from isthmus.kvtransfer.drivers import Drivers
from isthmus.kvtransfer.interface import Connector, MemoryRegion, PeerName
from isthmus.kvtransfer.writes import Sweep, Write, WriteOwner

if TYPE_CHECKING:  # it needs torch, which nothing else here does
    from isthmus.kvtransfer.staging import Converter


class RankPort(Protocol):
    """Methods are called on the manager's event loop. Once a port in another process is lost, those
    that wait raise InstanceLostError."""

    @property
    def endpoint(self) -> RankEndpoint:
        """The rank as peers see it."""
        ...

    @property
    def checksum(self) -> Checksum:
        """What the rank can compute and may."""
        ...

    @property
    def num_open_writes(self) -> int:
        """Submitted and not yet reported as ended."""
        ...

    @property
    def open_bytes(self) -> int: ...

    def bytes_per_s(self, peer: PeerName) -> float | None:
        """What its link to ``peer`` was measured to carry; None while that is not known here."""
        ...

    def max_write_bytes(self, peer: PeerName) -> int:
        """How large a write to ``peer`` should be at most."""
        ...

    def check_in_time(self, peer: PeerName, num_bytes: int, deadline_ns: int) -> None:
        """Raises TransferHopelessError when it is known that so many bytes cannot be at ``peer`` by
        ``deadline_ns`` (monotonic)."""
        ...

    def submit(self, write: Write) -> None:
        """Returns at once. The next sweep posts it, or tells why not."""
        ...

    def owner_ended(self, owner: WriteOwner) -> None:
        """Of its writes, those that are not posted yet need not be."""
        ...

    def wake(self) -> None:
        """There may be something to see: a patient sweep looks once more and returns."""
        ...

    async def sweep(self, patience_s: float) -> Sweep:
        """What happened; waits so long for something to happen. Of a lost port: how its writes
        ended, with an InstanceLostError as the sweep's error."""
        ...

    async def add_peer(self, peer: RankEndpoint, connector: str, timeout_s: float) -> PeerName:
        """``connector`` is one that both offer. Raises HandshakeError from it and TimeoutError when
        it takes too long."""
        ...

    async def remove_peer(self, peer: PeerName, timeout_s: float) -> None: ...

    async def count_corrupt(self, content: ChunkContent) -> int: ...

    async def close(self, timeout_s: float) -> bool:
        """False when the connector did not close in time."""
        ...


class LocalPort:
    """Implements ``RankPort`` in this process."""

    def __init__(
        self,
        layout: KvLayout,
        region: MemoryRegion,
        num_blocks: int,
        connectors: Sequence[Connector],
        config: TransferConfig,
        clock: Clock,
        converter: Converter | None = None,
    ) -> None:
        """Registers ``region`` with the connectors, of which each pair uses one, and blocks until
        that is done. Raises ConfigError for checksums that cannot be computed here, and
        TransferError from a connector that the configuration names, or where none can be had. What
        ``region`` has behind the blocks is the ``converter``'s."""
        self._converter = converter
        self.checksum = offered_checksum(config, region)
        self._read: BlockReader | None = None
        if self.checksum is not Checksum.NONE:
            self._read = host_reader(region, layout, num_blocks)
        self._drivers = Drivers(connectors, region, clock, bool(config.named_connectors))
        self.endpoint = RankEndpoint(
            tp_rank=layout.tp_rank,
            connectors=self._drivers.offers,
            base_address=region.base_address,
            num_bytes=region.num_bytes,
            num_blocks=num_blocks,
            layout=layout,
        )

    @property
    def num_open_writes(self) -> int:
        return self._drivers.num_open_writes

    @property
    def open_bytes(self) -> int:
        return self._drivers.open_bytes

    def bytes_per_s(self, peer: PeerName) -> float | None:
        return self._drivers.bytes_per_s(peer)

    def max_write_bytes(self, peer: PeerName) -> int:
        return self._drivers.max_write_bytes(peer)

    def check_in_time(self, peer: PeerName, num_bytes: int, deadline_ns: int) -> None:
        self._drivers.check_in_time(peer, num_bytes, deadline_ns)

    def submit(self, write: Write) -> None:
        if write.conversion is not None:
            assert self._converter is not None, "there is no memory to stage in"
            write.stage = self._converter.stage(write.conversion, write.peer)
        if write.content is not None and self._read is not None:
            read = self._read if write.stage is None else write.stage.read
            write.notification = partial(write.content.seal, read)
        self._drivers.submit(write)

    def owner_ended(self, owner: WriteOwner) -> None:
        """Nothing to do: the driver asks the owner itself right before it posts."""

    def wake(self) -> None:
        self._drivers.wake()

    async def sweep(self, patience_s: float) -> Sweep:
        return await self._drivers.sweep(patience_s)

    async def add_peer(self, peer: RankEndpoint, connector: str, timeout_s: float) -> PeerName:
        region = MemoryRegion(peer.base_address, peer.num_bytes)
        offered = peer.connector(connector)
        if offered is None:
            raise HandshakeError(f"the peer does not offer {connector}", stage="handshake")
        return await self._drivers.add_peer(offered, region, timeout_s)

    async def remove_peer(self, peer: PeerName, timeout_s: float) -> None:
        await self._drivers.remove_peer(peer, timeout_s)

    async def count_corrupt(self, content: ChunkContent) -> int:
        """On the connector's thread: it takes a millisecond for each ten megabytes."""
        read = self._read
        assert read is not None, "checksums were agreed on"
        return await self._drivers.run(lambda: content.count_corrupt(read))

    async def close(self, timeout_s: float) -> bool:
        return await self._drivers.close(timeout_s)
