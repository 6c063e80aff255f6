"""How long sessions were open, told to the observer and the log when they end."""

from __future__ import annotations

from collections.abc import Callable, Set

from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.ids import TransferId
from isthmus.common.logging import get_logger
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.observer import Side, TransferObserver

_log = get_logger("kvtransfer")


class SessionTimes:
    def __init__(
        self,
        clock: Clock,
        observer: TransferObserver,
        connector_with: Callable[[InstanceRef], str],
    ) -> None:
        """``connector_with``: what KV goes over with an instance."""
        self._clock = clock
        self._observer = observer
        self._connector_with = connector_with
        self._opened_ns: dict[tuple[Side, TransferId], int] = {}

    def opened(self, side: Side, ticket: TransferTicket) -> None:
        self._opened_ns[side, ticket.transfer_id] = self._clock.monotonic_ns()

    def ended(self, side: Side, ticket: TransferTicket, state: str, num_bytes: int) -> None:
        """``num_bytes`` were moved."""
        opened_ns = self._opened_ns.pop((side, ticket.transfer_id))
        seconds = (self._clock.monotonic_ns() - opened_ns) / NS_PER_S
        _log.debug(
            "transfer ended",
            request_id=ticket.request_id,
            transfer=ticket.transfer_id.hex(),
            side=side,
            state=state,
        )
        other = ticket.target if side == "send" else ticket.source
        self._observer.session_ended(side, state, self._connector_with(other), num_bytes, seconds)

    def check_integrity(self, open_ids: Set[tuple[Side, TransferId]]) -> None:
        """AssertionError when the time of a session is kept that is not there any more."""
        assert set(self._opened_ns) <= open_ids, "a session left its opening time behind"
