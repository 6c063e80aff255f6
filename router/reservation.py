"""What one decision keeps busy until it ends: a reservation, with a leg on each of its instances.

::

    decision ───────────── first token ───────────── end
      prefill leg (prefill instance, or decode for a local prefill)
      decode leg: incoming ────────── visible

All times are this router's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from isthmus.common.ids import DecisionId, InstanceId
from isthmus.common.state_machine import Transitions

NO_LIMIT = float("inf")


class ReservationState(Enum):
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"

    __hash__ = object.__hash__  # an enum's own is computed in Python


RESERVATION_TRANSITIONS: Transitions[ReservationState] = Transitions(
    {
        ReservationState.PREFILLING: frozenset({ReservationState.DECODING, ReservationState.ENDED}),
        ReservationState.DECODING: frozenset({ReservationState.ENDED}),
        ReservationState.ENDED: frozenset(),
    }
)


@dataclass(frozen=True, slots=True)
class Burden:
    """What one request adds: to where its prompt is computed, and to where it decodes."""

    prefill_tokens: int  # not cached
    prefill_ms: float
    context_tokens: int  # that each of its decode steps attends to, on average
    blocks: int
    tpot_limit_ms: float = NO_LIMIT  # its own target, which newcomers must leave it


@dataclass(slots=True)
class Reservation:
    decision_id: DecisionId
    prefill_at: InstanceId  # the decode instance for a local prefill
    decode_at: InstanceId
    burden: Burden
    made_ns: int
    expires_ns: int
    number: int  # in the order in which they were made
    state: ReservationState = ReservationState.PREFILLING
    first_token_ns: int = 0

    @property
    def is_local(self) -> bool:
        return self.prefill_at == self.decode_at
