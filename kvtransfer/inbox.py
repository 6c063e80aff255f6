"""What the connectors brought for open transfers: notifications, each looked at once.

Nothing is trusted without its epoch: a notification counts only when it comes from the very
instance and epoch that the ticket names, and its blocks are compared with their checksums first.
Whatever does not count is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from isthmus.common.ids import TransferId
from isthmus.common.logging import get_logger
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.notification import Notification, decode
from isthmus.kvtransfer.observer import TransferObserver
from isthmus.kvtransfer.peers import PeerTable
from isthmus.kvtransfer.rank_port import RankPort
from isthmus.kvtransfer.receive_session import Ignored, ReceiveSession
from isthmus.kvtransfer.routes import Ranks


class Inbox:
    """Belongs to the manager, whose sessions, peers and ports it looks at."""

    def __init__(
        self,
        receives: Mapping[TransferId, ReceiveSession],
        peers: PeerTable,
        ports: Sequence[RankPort],
        observer: TransferObserver,
        connector_with: Callable[[InstanceRef], str],
    ) -> None:
        self._receives = receives
        self._peers = peers
        self._ports = ports
        self._observer = observer
        self._connector_with = connector_with
        self.num_bytes = 0
        self.ignored: Counter[Ignored] = Counter()

    async def accept(self, rank: int, peer_name: PeerName, payload: bytes) -> None:
        """``payload`` came to our ``rank``."""
        ignored = await self._deliver(rank, peer_name, payload)
        if ignored is not None:
            self.ignored[ignored] += 1
            self._observer.notification_ignored(ignored)

    async def _deliver(self, rank: int, peer_name: PeerName, payload: bytes) -> Ignored | None:
        note = decode(payload)
        if note is None:
            return Ignored.MALFORMED
        session = self._receives.get(note.transfer_id)
        if session is None:
            return Ignored.UNKNOWN
        source_rank = self._peers.rank_of(peer_name, rank, session.ticket.source)
        if source_rank is None:
            return Ignored.FOREIGN
        ranks = source_rank, rank
        num_corrupt = await self._count_corrupt(session, note, ranks)
        before = session.num_bytes
        ignored = session.accept(note, ranks, num_corrupt)
        self.num_bytes += session.num_bytes - before
        return ignored

    async def _count_corrupt(
        self, session: ReceiveSession, note: Notification, ranks: Ranks
    ) -> int:
        content = session.content_of(note, ranks)
        if content is None:
            return 0
        num_corrupt = await self._ports[ranks[1]].count_corrupt(content)
        if num_corrupt and session.is_open:  # else its blocks may have been others' meanwhile
            self._observer.blocks_corrupt(num_corrupt, self._connector_with(session.ticket.source))
            get_logger("kvtransfer").warning(
                "corrupt blocks",
                request_id=session.ticket.request_id,
                transfer=note.transfer_id.hex(),
                chunk=note.chunk,
                num_blocks=num_corrupt,
            )
        return num_corrupt
