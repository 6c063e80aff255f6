"""What the router has just sent where, until the instances' own reports show it.

Owns the reservations and, by instance, their legs (``legs``, which says what of them is pending): a
prefill leg burdens the instance that computes the prompt until the first token, a decode leg the
decode instance until the end. All times are this router's monotonic clock.
"""

from __future__ import annotations

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import DecisionId, InstanceId
from isthmus.router.legs import Legs
from isthmus.router.pending import PendingLoad
from isthmus.router.reservation import (
    RESERVATION_TRANSITIONS,
    Burden,
    Reservation,
    ReservationState,
)


class Ledger:
    """The set of reservations. One owner (the router), one thread.

    ``changed`` gathers the instances whose pending load has changed; whoever reads it clears it.
    """

    def __init__(self, ttl_ms: int, changed: set[InstanceId] | None = None) -> None:
        self._ttl_ns = ttl_ms * NS_PER_MS
        self.num_freed = 0  # legs, so far
        self.changed: set[InstanceId] = set() if changed is None else changed
        self._reservations: dict[DecisionId, Reservation] = {}  # in the order of their expiry
        self._num_made = 0
        self._due_ns = 0  # none expires before
        self._legs: dict[InstanceId, Legs] = {}  # of whoever has had any, or has reported

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, decision_id: DecisionId) -> bool:
        return decision_id in self._reservations

    def num_open(self, instance_id: InstanceId) -> int:
        """Reservations with a leg on the instance."""
        return len(self._legs.get(instance_id, ()))

    def reserve(
        self,
        decision_id: DecisionId,
        prefill_at: InstanceId,
        decode_at: InstanceId,
        burden: Burden,
        now_ns: int,
    ) -> Reservation:
        assert decision_id not in self._reservations
        self._num_made += 1
        reservation = Reservation(
            decision_id,
            prefill_at,
            decode_at,
            burden,
            now_ns,
            now_ns + self._ttl_ns,
            self._num_made,
        )
        self._reservations[decision_id] = reservation
        for instance_id in {prefill_at, decode_at}:
            self._legs_of(instance_id).add(reservation)
            self.changed.add(instance_id)
        return reservation

    def first_token(self, decision_id: DecisionId, now_ns: int) -> Reservation | None:
        """Frees the prefill leg. None when the reservation is unknown or already decoding."""
        reservation = self._reservations.get(decision_id)
        if reservation is None or reservation.state is not ReservationState.PREFILLING:
            return None
        self._move(reservation, ReservationState.DECODING)
        reservation.first_token_ns = now_ns
        reservation.expires_ns = now_ns + self._ttl_ns
        self._reservations[decision_id] = self._reservations.pop(decision_id)
        self.num_freed += 1
        self.changed.add(reservation.prefill_at)
        # An instance may have been forgotten meanwhile.
        legs = self._legs.get(reservation.prefill_at)
        if legs is not None:
            legs.computed(reservation, now_ns)
        legs = self._legs.get(reservation.decode_at)
        if legs is not None and legs.arrive(reservation):
            self.changed.add(reservation.decode_at)
        return reservation

    def end(self, decision_id: DecisionId, now_ns: int) -> Reservation | None:
        """Frees what is left. None when there was nothing: ending twice is harmless."""
        reservation = self._reservations.pop(decision_id, None)
        if reservation is not None:
            self._move(reservation, ReservationState.ENDED)
            self.num_freed += 1
            for instance_id in {reservation.prefill_at, reservation.decode_at}:
                legs = self._legs.get(instance_id)
                if legs is not None and legs.end(reservation, now_ns):
                    self.changed.add(instance_id)
        return reservation

    def expire(self, now_ns: int) -> list[Reservation]:
        """Ends and returns those whose outcome was never told."""
        due: list[Reservation] = []
        if now_ns < self._due_ns:
            return due  # to find the oldest takes long where many before it have gone
        self._due_ns = now_ns + self._ttl_ns
        while self._reservations:
            oldest = next(iter(self._reservations.values()))
            if oldest.expires_ns > now_ns:
                self._due_ns = oldest.expires_ns
                break
            due.append(oldest)
            self.end(oldest.decision_id, now_ns)
        return due

    def seen(
        self,
        instance_id: InstanceId,
        num_seqs: int,
        now_ns: int,
        num_prompts: int | None = None,
    ) -> None:
        """A report came that speaks of ``num_seqs`` waiting and running sequences, of which
        ``num_prompts`` have no token yet. None = it does not say: then all may be prompts."""
        self._legs_of(instance_id).report(num_seqs, now_ns, num_prompts)
        self.changed.add(instance_id)

    def may_forget(self, instance_id: InstanceId, num_prompts: int) -> bool:
        """Whether a report that speaks of so many prompts, and another one later, may say more
        than the later one alone (``seen``)."""
        legs = self._legs.get(instance_id)
        return legs is not None and (len(legs.prompts) > num_prompts or bool(legs.forgotten))

    def forget(self, instance_id: InstanceId) -> None:
        """The instance is gone or restarted: its legs mean nothing any more."""
        self._legs.pop(instance_id, None)
        self.changed.add(instance_id)

    def pending(self, instance_id: InstanceId) -> PendingLoad:
        legs = self._legs.get(instance_id)
        return legs.pending if legs is not None else PendingLoad()

    def unreported(self, instance_id: InstanceId) -> list[Burden]:
        """Prompts that it computes and its last report cannot contain."""
        legs = self._legs.get(instance_id)
        return legs.unreported if legs is not None else []

    def unreported_ms(self, instance_id: InstanceId) -> float:
        """The work of these."""
        legs = self._legs.get(instance_id)
        return legs.unreported_ms if legs is not None else 0.0

    def check_integrity(self) -> None:
        """AssertionError when the views of the set disagree."""
        expiries = [reservation.expires_ns for reservation in self._reservations.values()]
        assert expiries == sorted(expiries)
        for legs in self._legs.values():
            for kind in (legs.incoming, legs.recent, legs.settled):
                for decision_id, reservation in kind.items():
                    assert self._reservations.get(decision_id) is reservation
            legs.check_integrity()

    def _legs_of(self, instance_id: InstanceId) -> Legs:
        legs = self._legs.get(instance_id)
        if legs is None:
            legs = self._legs[instance_id] = Legs(instance_id)
        return legs

    def _move(self, reservation: Reservation, new: ReservationState) -> None:
        reservation.state = RESERVATION_TRANSITIONS.check(reservation.state, new)
