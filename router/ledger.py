"""What the router has just sent where, until the instances' own reports show it.

A reservation has two legs. The prefill leg burdens the instance that computes the prompt until the
first token; the decode leg burdens the decode instance until the end. A remote decode leg becomes
*visible* to its instance's reports at the first token, every other leg when it is made.

::

    decision ───────────── first token ───────────── end
      prefill leg (prefill instance, or decode for a local prefill)
      decode leg: incoming ────────── visible

So that nothing is counted twice, the pending load of an instance is what its last report cannot
contain: incoming legs, legs that became visible after the report came, and, of those that became
visible shortly before it (``SETTLE_MS``: they may have been on their way), the newest ones that
exceed the number of sequences the report speaks of. A new leg is added to the sums; whatever ends
makes them be recomputed, over the legs that are not surely in the report (older ones are only
counted), so they cannot drift or go negative. All times are this router's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from math import isclose

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import DecisionId, InstanceId
from isthmus.common.state_machine import Transitions

SETTLE_MS = 1_000
NO_LIMIT = float("inf")
NEVER_NS = 1 << 62


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


# Looked up per leg and sum; an enum's member costs more to find than to compare.
_PREFILLING = ReservationState.PREFILLING


@dataclass(frozen=True, slots=True)
class Burden:
    """What one request adds: to where its prompt is computed, and to where it decodes."""

    prefill_tokens: int  # not cached
    prefill_ms: float
    context_tokens: int  # that each of its decode steps attends to, on average
    blocks: int
    tpot_limit_ms: float = NO_LIMIT  # its own target, which newcomers must leave it
    handoff_ms: float = 0.0  # until it decodes, as predicted when it was sent


@dataclass(slots=True)
class Reservation:
    decision_id: DecisionId
    prefill_at: InstanceId  # the decode instance for a local prefill
    decode_at: InstanceId
    burden: Burden
    made_ns: int
    expires_ns: int
    state: ReservationState = ReservationState.PREFILLING
    first_token_ns: int = 0

    @property
    def is_local(self) -> bool:
        return self.prefill_at == self.decode_at

    @property
    def comes_ns(self) -> int:
        """When it should begin to decode, if its prompt is computed elsewhere."""
        return self.made_ns + int(self.burden.handoff_ms * NS_PER_MS)


@dataclass(slots=True)
class PendingLoad:
    """On top of an instance's last report. Of all that this router knows to be there:
    ``tightest_tpot_ms`` of the decode legs, ``prompts_ms`` of prompts without a first token,
    ``head_ms`` of the oldest of them, which is computed since ``head_since_ns`` at the earliest;
    ``num_strange``: sequences in the last report that are not this router's; ``num_coming``: decode
    legs whose prompts are computed elsewhere, of which the first should come at ``comes_ns``.
    """

    prefill_seqs: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    decode_seqs: int = 0
    decode_context_tokens: int = 0
    decode_blocks: int = 0
    tightest_tpot_ms: float = NO_LIMIT
    prompts_ms: float = 0.0
    head_ms: float = 0.0
    head_since_ns: int = 0
    num_strange: int = 0
    num_coming: int = 0
    comes_ns: int = NEVER_NS


@dataclass(slots=True)
class Seen:
    """The last report of an instance: when it came, of how many sequences it speaks, and how many
    of them are not this router's."""

    at_ns: int
    num_seqs: int
    num_strange: int = 0


_NEVER = Seen(-1, 0)


@dataclass(slots=True)
class _Legs:
    """Of one instance. ``settled``: surely in its reports, so only their number matters."""

    recent: dict[DecisionId, Reservation] = field(default_factory=dict)
    settled: dict[DecisionId, Reservation] = field(default_factory=dict)
    prompts: dict[DecisionId, Reservation] = field(
        default_factory=dict
    )  # computed here, oldest first
    # Prompts that reports leave out, oldest first; all are older than ``prompts``.
    forgotten: dict[DecisionId, Reservation] = field(default_factory=dict)
    limits: dict[float, int] = field(default_factory=dict)  # TPOT limit → decode legs that have it

    def __len__(self) -> int:
        return len(self.recent) + len(self.settled)

    def has(self, decision_id: DecisionId) -> bool:
        return decision_id in self.recent or decision_id in self.settled

    @property
    def tightest(self) -> float:
        return min(self.limits, default=NO_LIMIT)

    @property
    def head(self) -> Reservation | None:
        """The prompt that is computed, if any is."""
        return next(iter(self.prompts.values()), None)

    def forget_prompts(self, num_prompts: int, now_ns: int) -> bool:
        """A report speaks of ``num_prompts`` prompts. Of those that it must contain, as many of the
        oldest as it leaves out are not there: what became of them was never told, or they wait at
        another instance. They are no work any more, else everybody would wait for them until they
        expire. They are again when a report speaks of more than all the others, of which the newest
        may be in it or not. What else is missing (a decode leg of unknown end, or whose KV is on
        its way) says nothing of prompts. Returns whether anything changed."""
        if len(self.prompts) <= num_prompts and not self.forgotten:
            return False
        surely_ns = now_ns - SETTLE_MS * NS_PER_MS
        sure = [*takewhile(lambda leg: leg.made_ns <= surely_ns, self.prompts.values())]
        gone = sure[: max(0, len(sure) - num_prompts)]
        for leg in gone:
            self.forgotten[leg.decision_id] = self.prompts.pop(leg.decision_id)
        num_back = num_prompts - len(self.prompts)
        back: dict[DecisionId, Reservation] = {}
        while self.forgotten and len(back) < num_back:
            decision_id, leg = self.forgotten.popitem()
            back = {decision_id: leg, **back}
        if back:
            self.prompts = {**back, **self.prompts}
        return bool(gone or back)

    def add(self, leg: Reservation, *, is_decode: bool, is_prompt: bool) -> None:
        self.recent[leg.decision_id] = leg
        if is_prompt:
            self.prompts[leg.decision_id] = leg
        if is_decode and leg.burden.tpot_limit_ms != NO_LIMIT:
            limit = leg.burden.tpot_limit_ms
            self.limits[limit] = self.limits.get(limit, 0) + 1

    def drop(self, leg: Reservation, is_decode: bool) -> bool:
        """False when it was not there (any more)."""
        self.prompts.pop(leg.decision_id, None)
        self.forgotten.pop(leg.decision_id, None)
        kinds = (self.recent, self.settled)
        if not any(kind.pop(leg.decision_id, None) is not None for kind in kinds):
            return False
        limit = leg.burden.tpot_limit_ms
        if is_decode and limit != NO_LIMIT:
            self.limits[limit] -= 1
            if not self.limits[limit]:
                del self.limits[limit]
        return True


class Ledger:
    """The set of reservations. One owner (the router), one thread.

    ``changed`` gathers the instances whose pending load has changed; whoever reads it clears it.
    """

    def __init__(self, ttl_ms: int, changed: set[InstanceId] | None = None) -> None:
        self._ttl_ns = ttl_ms * NS_PER_MS
        self.num_freed = 0  # legs, so far
        self.changed: set[InstanceId] = set() if changed is None else changed
        self._reservations: dict[DecisionId, Reservation] = {}  # in the order of their expiry
        self._due_ns = 0  # none expires before
        self._by_instance: dict[InstanceId, _Legs] = {}
        self._seen: dict[InstanceId, Seen] = {}
        self._prompt_done_ns: dict[InstanceId, int] = {}  # when the last first token came of it
        self._pending: dict[InstanceId, PendingLoad] = {}  # cache; absent = to be computed

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, decision_id: DecisionId) -> bool:
        return decision_id in self._reservations

    def num_open(self, instance_id: InstanceId) -> int:
        """Reservations with a leg on the instance."""
        return len(self._by_instance.get(instance_id, ()))

    def reserve(
        self,
        decision_id: DecisionId,
        prefill_at: InstanceId,
        decode_at: InstanceId,
        burden: Burden,
        now_ns: int,
    ) -> Reservation:
        assert decision_id not in self._reservations
        reservation = Reservation(
            decision_id, prefill_at, decode_at, burden, now_ns, now_ns + self._ttl_ns
        )
        self._reservations[decision_id] = reservation
        for instance_id in {prefill_at, decode_at}:
            legs = self._by_instance.get(instance_id)
            if legs is None:
                legs = self._by_instance[instance_id] = _Legs()
            is_prompt = instance_id == prefill_at
            legs.add(reservation, is_decode=instance_id == decode_at, is_prompt=is_prompt)
            self._count_new(instance_id, reservation, legs.tightest)
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
        legs = self._by_instance.get(reservation.prefill_at)
        if legs is not None and legs.has(decision_id):  # else its instance was forgotten meanwhile
            self._prompt_done_ns[reservation.prefill_at] = now_ns
        self._forget_sum(reservation.prefill_at)
        self.num_freed += 1
        if not reservation.is_local:
            self._drop_leg(reservation.prefill_at, reservation)
        elif legs is not None:
            legs.prompts.pop(decision_id, None)
            legs.forgotten.pop(decision_id, None)
        # Not local, it goes from incoming to visible since now: no earlier report can contain it,
        # so it is pending all the same, but it has come.
        self._forget_sum(reservation.decode_at)
        return reservation

    def end(self, decision_id: DecisionId, now_ns: int) -> Reservation | None:
        """Frees what is left. None when there was nothing: ending twice is harmless."""
        reservation = self._reservations.pop(decision_id, None)
        if reservation is not None:
            self._move(reservation, ReservationState.ENDED)
            self.num_freed += 1
            legs = self._by_instance.get(reservation.prefill_at)
            if legs is not None and legs.head is reservation:
                # The next prompt begins now at the earliest: it has not been delayed till here.
                self._prompt_done_ns[reservation.prefill_at] = now_ns
            for instance_id in {reservation.prefill_at, reservation.decode_at}:
                self._drop_leg(instance_id, reservation)
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
        legs, num_known = self._by_instance.get(instance_id), 0
        if legs is not None:
            num_known = len(legs.recent) + len(legs.settled)
            num_prompts = num_seqs if num_prompts is None else num_prompts
            if legs.forget_prompts(num_prompts, now_ns):
                self._prompt_done_ns[instance_id] = now_ns
        num_strange = num_seqs - num_known if num_seqs > num_known else 0
        self._seen[instance_id] = Seen(now_ns, num_seqs, num_strange)
        self._pending.pop(instance_id, None)
        self.changed.add(instance_id)

    def may_forget(self, instance_id: InstanceId, num_prompts: int) -> bool:
        """Whether a report that speaks of so many prompts, and another one later, may say more
        than the later one alone (``seen``)."""
        legs = self._by_instance.get(instance_id)
        return legs is not None and (len(legs.prompts) > num_prompts or bool(legs.forgotten))

    def forget(self, instance_id: InstanceId) -> None:
        """The instance is gone or restarted: its legs mean nothing any more."""
        self._by_instance.pop(instance_id, None)
        self._seen.pop(instance_id, None)
        self._prompt_done_ns.pop(instance_id, None)
        self._forget_sum(instance_id)

    def pending(self, instance_id: InstanceId) -> PendingLoad:
        return self._pending.get(instance_id) or self._recomputed(instance_id)

    def check_integrity(self) -> None:
        """AssertionError when the views of the set disagree."""
        expiries = [reservation.expires_ns for reservation in self._reservations.values()]
        assert expiries == sorted(expiries)
        for instance_id, legs in self._by_instance.items():
            assert len(legs), "an instance without legs has no entry"
            for kind in (legs.recent, legs.settled):
                for decision_id, reservation in kind.items():
                    assert self._reservations.get(decision_id) is reservation
            assert all(count > 0 for count in legs.limits.values())
            assert legs.forgotten.keys().isdisjoint(legs.prompts)
            ages = [leg.made_ns for kind in (legs.forgotten, legs.prompts) for leg in kind.values()]
            assert ages == sorted(ages)
            prompts = {
                name
                for kind in (legs.settled, legs.recent)
                for name, leg in kind.items()
                if leg.prefill_at == instance_id and leg.state is _PREFILLING
            }
            assert prompts == legs.prompts.keys() | legs.forgotten.keys()
            assert sum(legs.limits.values()) == sum(
                leg.decode_at == instance_id and leg.burden.tpot_limit_ms != NO_LIMIT
                for kind in (legs.recent, legs.settled)
                for leg in kind.values()
            )
        for instance_id, pending in self._pending.items():
            found = self._sum(instance_id, self._by_instance.get(instance_id))
            assert isclose(pending.prefill_ms, found.prefill_ms, rel_tol=1e-9, abs_tol=1e-9)
            assert isclose(pending.prompts_ms, found.prompts_ms, rel_tol=1e-9, abs_tol=1e-9)
            found = replace(found, prefill_ms=pending.prefill_ms, prompts_ms=pending.prompts_ms)
            assert pending == found

    def _move(self, reservation: Reservation, new: ReservationState) -> None:
        reservation.state = RESERVATION_TRANSITIONS.check(reservation.state, new)

    def _forget_sum(self, instance_id: InstanceId) -> None:
        self._pending.pop(instance_id, None)
        self.changed.add(instance_id)

    def _drop_leg(self, instance_id: InstanceId, leg: Reservation) -> None:
        legs = self._by_instance.get(instance_id)
        if legs is None or not legs.drop(leg, instance_id == leg.decode_at):
            return  # it ended there with the first token
        if not legs:
            del self._by_instance[instance_id]
        self._forget_sum(instance_id)

    def _count_new(self, instance_id: InstanceId, leg: Reservation, tightest: float) -> None:
        """Adds a leg that no report can contain yet to the sum, where there is one."""
        self.changed.add(instance_id)
        old = self._pending.get(instance_id)
        if old is None:
            return
        if leg.made_ns <= self._seen.get(instance_id, _NEVER).at_ns:
            self._forget_sum(instance_id)
            return
        burden = leg.burden
        is_prefill, is_decode = instance_id == leg.prefill_at, instance_id == leg.decode_at
        is_head = is_prefill and not old.prompts_ms
        is_coming = is_decode and not is_prefill
        self._pending[instance_id] = PendingLoad(
            old.prefill_seqs + is_prefill,
            old.prefill_tokens + burden.prefill_tokens * is_prefill,
            old.prefill_ms + burden.prefill_ms * is_prefill,
            old.decode_seqs + is_decode,
            old.decode_context_tokens + burden.context_tokens * is_decode,
            old.decode_blocks + burden.blocks * is_decode,
            tightest,
            old.prompts_ms + burden.prefill_ms * is_prefill,
            burden.prefill_ms if is_head else old.head_ms,
            leg.made_ns if is_head else old.head_since_ns,
            old.num_strange,
            old.num_coming + is_coming,
            min(old.comes_ns, leg.comes_ns) if is_coming else old.comes_ns,
        )

    def _recomputed(self, instance_id: InstanceId) -> PendingLoad:
        pending = self._sum(instance_id, self._by_instance.get(instance_id))
        self._pending[instance_id] = pending
        return pending

    def _sum(self, instance_id: InstanceId, legs: _Legs | None) -> PendingLoad:
        seen = self._seen.get(instance_id, _NEVER)
        if legs is None:
            return PendingLoad(num_strange=seen.num_strange)
        seen_ns, settled_ns = seen.at_ns, seen.at_ns - SETTLE_MS * NS_PER_MS
        hidden: list[Reservation] = []  # visible to the instance, but not in its last report
        incoming: list[Reservation] = []
        recent: list[tuple[int, int, Reservation]] = []  # maybe in it
        settled: list[Reservation] = []
        num_blocks = 0
        for place, leg in enumerate(legs.recent.values()):
            # Blocks are taken before the prompt is computed, so reports contain them early.
            if leg.made_ns > seen_ns and leg.decode_at == instance_id:
                num_blocks += leg.burden.blocks
            since_ns = leg.made_ns
            if leg.prefill_at != instance_id:
                if leg.state is _PREFILLING:
                    incoming.append(leg)
                    continue
                since_ns = leg.first_token_ns
            if since_ns > seen_ns:
                hidden.append(leg)
            elif since_ns > settled_ns:
                recent.append((since_ns, place, leg))
            else:
                settled.append(leg)
        for leg in settled:
            legs.settled[leg.decision_id] = legs.recent.pop(leg.decision_id)
        num_settled = len(legs.settled)
        if recent and num_settled + len(recent) > seen.num_seqs:
            recent.sort()
            hidden += [leg for _, _, leg in recent[max(0, seen.num_seqs - num_settled) :]]
        head = legs.head
        done_ns = self._prompt_done_ns.get(instance_id, 0)
        prefills = [leg.burden for leg in hidden if leg.state is _PREFILLING]
        decodes = [leg.burden for leg in hidden if leg.decode_at == instance_id]
        decodes += [leg.burden for leg in incoming]
        return PendingLoad(
            prefill_seqs=len(prefills),
            prefill_tokens=sum([burden.prefill_tokens for burden in prefills]),
            prefill_ms=sum([burden.prefill_ms for burden in prefills]),
            decode_seqs=len(decodes),
            decode_context_tokens=sum([burden.context_tokens for burden in decodes]),
            decode_blocks=num_blocks,
            tightest_tpot_ms=legs.tightest,
            prompts_ms=sum([leg.burden.prefill_ms for leg in legs.prompts.values()]),
            head_ms=head.burden.prefill_ms if head is not None else 0.0,
            head_since_ns=max(done_ns, head.made_ns) if head is not None else 0,
            num_strange=seen.num_strange,
            num_coming=len(incoming),
            comes_ns=min([leg.comes_ns for leg in incoming], default=NEVER_NS),
        )
