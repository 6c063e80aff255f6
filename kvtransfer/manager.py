"""All transfers of one instance: who its peers are, which sessions are open, what arrived for whom.

::

    worker ──open/push/cancel──▶ sessions ──writes──▶ RankPort, one a rank ──▶ ranks of peers
       ◀──── wait_complete, drained, quiesced ────┘ ◀── ended writes, notifications ──┘

The manager owns the tables; every method runs on one event loop. A session is the whole instance's:
what is pushed once leaves from every rank that has a part of it, and nothing is complete, quiet or
at rest before it is so on every rank. Connectors are driven only while a write is on its way or a
target block could still be written, so an idle instance costs nothing. Deadlines are timers of the
event loop and need no request, no step and no connector to fire.

Nothing is trusted without its epoch: a notification counts only when it comes from the very
instance and epoch that the ticket names, and a peer that restarts fails every session of its former
self.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.config import TransferConfig
from isthmus.common.errors import (
    HandshakeError,
    InstanceLostError,
    IsthmusError,
    TransferError,
    TransferHopelessError,
)
from isthmus.common.ids import InstanceId, TransferId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.logging import RateLimitedLog, get_logger
from isthmus.common.transfer import Checksum, TransferOffer, TransferTicket
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.chunks import SourceStores
from isthmus.kvtransfer.conversion import check_dtypes, check_feeds
from isthmus.kvtransfer.deadlines import Deadlines
from isthmus.kvtransfer.handshake import make_offer
from isthmus.kvtransfer.inbox import Inbox
from isthmus.kvtransfer.interface import PeerName
from isthmus.kvtransfer.notification import Flags, Notification
from isthmus.kvtransfer.observer import Side, SilentObserver, TransferObserver
from isthmus.kvtransfer.peers import Peer, PeerTable
from isthmus.kvtransfer.pollers import Pollers
from isthmus.kvtransfer.rank_port import RankPort
from isthmus.kvtransfer.receive_session import Ignored, ReceiveSession
from isthmus.kvtransfer.routes import Route
from isthmus.kvtransfer.send_session import SendSession
from isthmus.kvtransfer.session_times import SessionTimes
from isthmus.kvtransfer.tickets import check_ticket
from isthmus.kvtransfer.writes import Outcome, Sweep, Write

_CLOSE_TIMEOUT_S = 5.0


class TransferManager:
    def __init__(
        self,
        me: InstanceRef,
        ports: Sequence[RankPort],
        config: TransferConfig,
        clock: Clock,
        observer: TransferObserver | None = None,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """``ports`` are of all ranks of this instance, in their order; the manager closes them.
        ``on_failed`` is told, once, why no transfer can go on here (a rank is lost, a bug)."""
        self._me = me
        self._ports = ports
        self._layouts = tuple(port.endpoint.layout for port in ports)
        self._num_blocks = ports[0].endpoint.num_blocks
        self._config = config
        self._clock = clock
        self._observer: TransferObserver = observer or SilentObserver()
        self._on_failed = on_failed
        self._offer = make_offer(
            me,
            [port.endpoint for port in ports],
            Checksum.NONE if any(p.checksum is Checksum.NONE for p in ports) else ports[0].checksum,
        )
        self._peers = PeerTable(self._offer, ports, config.handshake_timeout_ms, self._peer_leaves)
        self._sends: dict[TransferId, SendSession] = {}
        self._receives: dict[TransferId, ReceiveSession] = {}
        self._times = SessionTimes(clock, self._observer, self._connector_with)
        self._pollers = Pollers(ports, self._sweep, lambda: bool(self._receives), self._break)
        self._inbox = Inbox(
            self._receives, self._peers, ports, self._observer, self._connector_with
        )
        self._deadlines = Deadlines(
            self._sends, self._receives, clock, self._forget_epoch, self._break
        )
        self._is_closed = False
        self._failure: IsthmusError | None = None
        self._log = RateLimitedLog(get_logger("kvtransfer"))
        self.bytes_sent = 0
        self.num_sweeps = 0

    @property
    def bytes_received(self) -> int:
        return self._inbox.num_bytes

    @property
    def ignored(self) -> Counter[Ignored]:
        """Notifications that changed nothing, by the reason."""
        return self._inbox.ignored

    # --- peers ---------------------------------------------------------------------------------

    def offer(self) -> TransferOffer:
        return self._offer

    async def answer(self, offer: TransferOffer) -> TransferOffer:
        """The answerer's half of a handshake: its own offer, once the initiator is a peer, to whom
        KV will go from here.

        Raises HandshakeError, LayoutMismatchError or StaleEpochError; the peer table is then as it
        was before.
        """
        await self._peers.meet(offer, lambda met: self._check_feeds(met.ranks[0].layout))
        return self._offer

    async def complete(self, offer: TransferOffer) -> None:
        """The initiator's half, with the answer: KV will come from there. Raises as ``answer``
        does."""
        await self._peers.meet(
            offer, lambda met: check_dtypes(met.ranks[0].layout, self._layouts[0])
        )

    def _check_feeds(self, target: KvLayout) -> None:
        check_feeds(self._layouts, self._staging_bytes, target)

    @property
    def _staging_bytes(self) -> int:
        """Of the rank that has least."""
        return min(port.endpoint.staging_bytes for port in self._ports)

    def knows(self, ref: InstanceRef) -> bool:
        """True after a handshake with exactly this epoch."""
        return self._peers.find(ref) is not None

    def checksum_with(self, ref: InstanceRef) -> Checksum:
        """What tickets from ``ref`` must ask for, after a handshake with exactly this epoch."""
        peer = self._peers.find(ref)
        return peer.checksum if peer is not None else Checksum.NONE

    def connectors_by_peer(self) -> dict[InstanceId, str]:
        """What KV goes over, for each peer of now."""
        return self._peers.connectors()

    def layout_of(self, ref: InstanceRef) -> KvLayout | None:
        """Of the peer's first rank, after a handshake with exactly this epoch."""
        peer = self._peers.find(ref)
        return peer.ranks[0].layout if peer is not None else None

    def idle_peers(self) -> set[InstanceId]:
        """Peers with whom nothing is open: no session, no block that one could still write to."""
        busy = {send.ticket.target.instance_id for send in self._sends.values()}
        busy |= {receive.ticket.source.instance_id for receive in self._receives.values()}
        return {peer.ref.instance_id for peer in self._peers} - busy

    async def forget(self, instance_id: InstanceId, *, is_gone: bool = False) -> None:
        """A peer was lost: its sessions fail with InstanceLostError and the connector drops it.

        ``is_gone`` is the caller's proof that the peer's process has ended (its pid is gone, a
        newer epoch is registered); without it a stopped process may yet go on writing, so target
        blocks rest until the ticket's deadline and the quarantine have passed.
        """
        lost = InstanceLostError(
            f"{instance_id} is lost", stage="transfer", instance_id=instance_id
        )
        await self._peers.forget(instance_id, lost, is_gone)
        self._pollers.look()

    async def _forget_epoch(self, ref: InstanceRef) -> None:
        """Nothing where another epoch is the peer by now: this one was dropped for it."""
        if self._peers.find(ref) is not None:
            await self.forget(ref.instance_id)

    def _peer_leaves(self, instance_id: InstanceId, error: IsthmusError, is_gone: bool) -> None:
        for receive in list(self._receives.values()):
            if receive.ticket.source.instance_id == instance_id:
                receive.peer_gone(error, is_gone)
        for send in list(self._sends.values()):
            if send.ticket.target.instance_id == instance_id:
                send.fail(error)
        rates = self.bytes_per_s()
        rates.pop(instance_id, None)
        self._observer.links_measured(rates, self.connectors_by_peer())

    # --- sessions ------------------------------------------------------------------------------

    def open_receive(self, ticket: TransferTicket) -> ReceiveSession:
        """For the decode side, before the ticket leaves. Raises StaleEpochError,
        LayoutMismatchError, DeadlineError, TransferError (target blocks that cannot be right) and
        HandshakeError (no handshake with the source yet)."""
        self._check_ticket(ticket, ticket.target, self._layouts[0], self._num_blocks)
        peer = self._peer(ticket.source)
        self._check_checksum(ticket, peer)
        if ticket.transfer_id in self._receives:
            raise TransferError("this transfer id is in use", stage="transfer")
        session = ReceiveSession(
            ticket,
            peer.routes_to(self._layouts),
            self._deadline_ns(ticket),
            self._config.deadline_ms * NS_PER_MS,
            self._quarantine_ns,
            self,
        )
        self._receives[ticket.transfer_id] = session
        self._opened("receive", ticket)
        return session

    def open_send(self, ticket: TransferTicket) -> SendSession:
        """For the prefill side. Raises TransferHopelessError when the link is known to be too slow,
        and what ``open_receive`` raises."""
        peer = self._peer(ticket.target)
        target = peer.ranks[0]
        self._check_ticket(ticket, ticket.source, target.layout, target.num_blocks)
        if ticket.transfer_id in self._sends:
            raise TransferError("this transfer id is in use", stage="transfer")
        self._check_checksum(ticket, peer)
        self._check_feeds(target.layout)
        routes = peer.routes_from(self._layouts)
        deadline_ns = self._deadline_ns(ticket)
        self._check_in_time(ticket, routes, deadline_ns)
        session = SendSession(
            ticket,
            routes,
            SourceStores(self._num_blocks, self._staging_bytes),
            deadline_ns,
            self._quarantine_ns,
            self,
        )
        self._sends[ticket.transfer_id] = session
        self._opened("send", ticket)
        return session

    def _peer(self, ref: InstanceRef) -> Peer:
        self._peers.check_epoch(ref)
        peer = self._peers.find(ref)
        if peer is None:
            raise HandshakeError(
                f"no handshake with {ref.instance_id} of epoch {ref.epoch}",
                stage="transfer",
                instance_id=ref.instance_id,
            )
        return peer

    def sessions_by_state(self) -> dict[str, int]:
        """Sessions that still own something, as ``send:streaming`` → count."""
        counts: Counter[str] = Counter()
        counts.update(f"send:{session.state.value}" for session in self._sends.values())
        counts.update(f"receive:{session.state.value}" for session in self._receives.values())
        return dict(counts)

    def bytes_per_s(self) -> dict[InstanceId, float]:
        """What goes to each peer in a second, as measured; peers without a measurement are left
        out."""
        return self._peers.bytes_per_s()

    @property
    def inflight_bytes(self) -> int:
        """Pushed and not yet in a peer's memory."""
        return sum(port.open_bytes for port in self._ports)

    def check_integrity(self) -> None:
        """AssertionError when an ended session is kept without need or a write has no session."""
        for send in self._sends.values():
            assert send.is_open or not send.is_quiet, f"send session kept: {send.state}"
        for receive in self._receives.values():
            assert receive.is_open or not receive.is_quiescent, f"receive kept: {receive.state}"
        sends: set[tuple[Side, TransferId]] = {("send", key) for key in self._sends}
        self._times.check_integrity(sends | {("receive", key) for key in self._receives})

    def _check_ticket(
        self,
        ticket: TransferTicket,
        addressee: InstanceRef,
        target: KvLayout,
        num_target_blocks: int,
    ) -> None:
        if self._is_closed:
            raise TransferError("this instance is shutting down", stage="transfer")
        if self._failure is not None:
            raise self._failure
        check_ticket(ticket, addressee, self._me, target, num_target_blocks, self._clock.now_ns())

    @staticmethod
    def _check_checksum(ticket: TransferTicket, peer: Peer) -> None:
        if ticket.checksum is not peer.checksum:
            raise HandshakeError(
                f"checksum: {peer.checksum.value} agreed, {ticket.checksum.value} in the ticket",
                stage="transfer",
                instance_id=peer.ref.instance_id,
            )

    def _check_in_time(
        self, ticket: TransferTicket, routes: Mapping[Route, PeerName], deadline_ns: int
    ) -> None:
        try:
            for route, name in routes.items():
                num_bytes = ticket.num_blocks * route.source.num_layers * route.layer_bytes
                self._ports[route.source.tp_rank].check_in_time(name, num_bytes, deadline_ns)
        except TransferHopelessError:
            self._observer.hopeless(self._connector_with(ticket.target))
            raise

    def _connector_with(self, ref: InstanceRef) -> str:
        """For metrics; ``none`` for one that has left."""
        peer = self._peers.find(ref)
        return peer.connector if peer is not None else "none"

    def _deadline_ns(self, ticket: TransferTicket) -> int:
        """Monotonic."""
        return self._clock.monotonic_ns() + ticket.deadline_ns - self._clock.now_ns()

    @property
    def _quarantine_ns(self) -> int:
        return self._config.quarantine_ms * NS_PER_MS

    def _opened(self, side: Side, ticket: TransferTicket) -> None:
        self._times.opened(side, ticket)
        self._deadlines.arm()
        self._pollers.look()

    # --- what sessions tell (SendHost, ReceiveHost) -----------------------------------------------

    def submit(self, write: Write) -> None:
        self._ports[write.rank].submit(write)
        self._pollers.kick(write.rank)

    def max_write_bytes(self, rank: int, peer: PeerName) -> int:
        return self._ports[rank].max_write_bytes(peer)

    def monotonic_ns(self) -> int:
        return self._clock.monotonic_ns()

    def send_ended(self, session: SendSession) -> None:
        if isinstance(session.error, TransferHopelessError):
            self._observer.hopeless(self._connector_with(session.ticket.target))
        for port in self._ports:
            port.owner_ended(session)
        self._deadlines.arm()
        self._times.ended("send", session.ticket, session.state.value, session.num_bytes)

    def receive_ended(self, session: ReceiveSession) -> None:
        self._times.ended("receive", session.ticket, session.state.value, session.num_bytes)
        self._pollers.look()

    def decline(self, ticket: TransferTicket) -> None:
        """Tells the target of a ticket that was never opened that nothing will come."""
        flags = Flags.ABORTED | Flags.QUIET
        self._tell(ticket.target, Notification(ticket.transfer_id, flags=flags))

    def send_quiet(self, session: SendSession) -> None:
        self._sends.pop(session.ticket.transfer_id, None)
        note = session.abort_note()
        if note is not None:
            self._tell(session.ticket.target, note)

    def _tell(self, target: InstanceRef, note: Notification) -> None:
        peer = self._peers.find(target)
        if peer is None:
            return
        # One rank speaks for all: the session counts the writes of every one.
        (rank, _), name = next(iter(peer.names.items()))
        expires_ns = self._clock.monotonic_ns() + self._quarantine_ns
        self.submit(Write(name, (), note.encode(), expires_ns, owner=_Notice(), rank=rank))

    def receive_quiescent(self, session: ReceiveSession) -> None:
        self._receives.pop(session.ticket.transfer_id, None)

    def receive_needs_poll(self) -> None:
        self._pollers.look()

    def receive_owed(self) -> None:
        self._deadlines.arm()

    # --- time ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to drive the connectors. Call once, on the event loop."""
        self._pollers.start()

    async def close(self) -> None:
        """Fails every session, then closes the connectors. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(TransferError("this instance is shutting down", stage="transfer"))
        await self._deadlines.close()
        await self._pollers.close()
        closed = await asyncio.gather(*(port.close(_CLOSE_TIMEOUT_S) for port in self._ports))
        if not all(closed):
            self._log.warning("close", "a connector did not close in time")

    def expire_due(self) -> None:
        """Ends every session whose deadline or patience has passed, and the writes of those that
        ended long ago. Runs by timer."""
        self._deadlines.expire_due()

    def _break(self, failure: IsthmusError) -> None:
        """No transfer can go on here."""
        if self._failure is None:
            self._failure = failure
            if self._on_failed is not None:
                self._on_failed(failure)
        self._fail_all(failure)

    def _fail_all(self, error: IsthmusError) -> None:
        for session in self._deadlines.open_sessions():
            session.fail(error)

    async def sweep_once(self, patience_s: float = 0.0) -> None:
        """Drives every connector once and hands out what they brought."""
        for rank in range(len(self._ports)):
            await self._sweep(rank, patience_s)

    async def _sweep(self, rank: int, patience_s: float) -> None:
        """Runs by itself after start."""
        sweep = await self._ports[rank].sweep(patience_s)
        self.num_sweeps += 1
        self.expire_due()  # first: what comes after the deadline must not count
        await self._hand_out(sweep, rank)
        for session in list(self._receives.values()):
            session.swept(rank, sweep.started_ns)

    async def _hand_out(self, sweep: Sweep, rank: int) -> None:
        for write, outcome, error in sweep.ended:
            if outcome is Outcome.DONE:
                self.bytes_sent += write.num_bytes
            write.owner.write_ended(write, outcome, error)
        if sweep.ended:
            self._observer.links_measured(self.bytes_per_s(), self.connectors_by_peer())
        for peer_name, payload in sweep.notifications:
            await self._inbox.accept(rank, peer_name, payload)
        if isinstance(sweep.error, InstanceLostError):
            raise sweep.error
        if sweep.error is not None:
            self._log.warning("connector", "taking notifications failed", error=repr(sweep.error))


class _Notice:
    """Owner of a write without bytes that nobody waits for."""

    is_open = True
    num_bytes_left = 0

    def write_ended(self, write: Write, outcome: Outcome, error: IsthmusError | None) -> None:
        pass
