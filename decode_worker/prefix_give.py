"""What a prefill instance lacks of a prompt and this instance has: sent when it asks.

The blocks are prefix hits of the request's reservation, so they stay while the request lives. They
are read until the session is quiet: while the peer may still wait for them, ``end`` must return
before anybody lets go of them.
"""

from __future__ import annotations

from isthmus.common.errors import IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.transfer import TransferTicket
from isthmus.engine.types import Reservation
from isthmus.kvtransfer.manager import TransferManager
from isthmus.kvtransfer.send_session import SendSession

log = get_logger("prefix_give")


class PrefixGive:
    """At most one for each attempt to have a prompt computed elsewhere."""

    def __init__(self, transfers: TransferManager, reservation: Reservation) -> None:
        self._transfers = transfers
        self._reservation = reservation
        self._session: SendSession | None = None

    @property
    def is_quiet(self) -> bool:
        return self._session is None or self._session.is_quiet

    def give(self, ticket: TransferTicket) -> None:
        """Sends the blocks, or says that they will not come: then the peer computes the prompt
        from its start. Raises nothing."""
        held = self._reservation.num_cached_tokens
        is_ours = ticket.request_id == self._reservation.request_id
        if self._session is not None or not is_ours or ticket.num_tokens > held:
            log.warning(
                "a prefix is asked for that is not here",
                request_id=ticket.request_id,
                peer=ticket.target.instance_id,
                num_tokens=ticket.num_tokens,
                num_held=held,
            )
            self._transfers.decline(ticket)
            return
        try:
            session = self._session = self._transfers.open_send(ticket)
            blocks = session.source_blocks(0, ticket.num_blocks)
            own = self._reservation.cached_block_ids[blocks.start : blocks.stop]
            session.push(0, own, is_last=True, num_blocks=ticket.num_blocks)
        except IsthmusError as error:
            log.info(
                "a prefix cannot be given", peer=ticket.target.instance_id, reason=error.message
            )
            if self._session is not None:
                self._session.fail(error)  # which tells the peer
            else:
                self._transfers.decline(ticket)

    def stop(self) -> None:
        """Sends nothing more."""
        if self._session is not None:
            self._session.cancel()

    async def end(self) -> None:
        """Stops, and returns when no block is read any more; a peer whose writes do not end within
        the quarantine is dropped."""
        if self._session is not None:
            self._session.cancel()
            await self._session.at_rest()
