"""The ledger against a brute-force model: nothing negative, nothing left, nothing counted twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import DecisionId, InstanceId
from isthmus.router.ledger import Ledger
from isthmus.router.legs import SETTLE_MS, Legs
from isthmus.router.pending import PendingLoad
from isthmus.router.reservation import (
    NO_LIMIT,
    RESERVATION_TRANSITIONS,
    Burden,
    Reservation,
    ReservationState,
)

TTL_MS = 5_000
PREFILLS = [InstanceId("p0"), InstanceId("p1")]
DECODES = [InstanceId("d0"), InstanceId("d1")]
INSTANCES = PREFILLS + DECODES


def added_up(legs: Legs, seen_ns: int, seen_seqs: int) -> tuple[PendingLoad, list[Burden]]:
    """What is pending, and which prompts are unreported, by looking at each leg; ``num_strange``
    left out."""
    name = legs.instance_id
    kinds = (legs.incoming, legs.settled, legs.recent)
    everything = [leg for kind in kinds for leg in kind.values()]
    incoming: list[Reservation] = []
    hidden: list[Reservation] = []
    maybe: list[tuple[int, Reservation]] = []
    num_settled = num_blocks = 0
    for leg in everything:
        is_here, is_prompt = leg.prefill_at == name, leg.state is ReservationState.PREFILLING
        since_ns = leg.made_ns if is_here else leg.first_token_ns
        if leg.decode_at == name and leg.made_ns > seen_ns:
            num_blocks += leg.burden.blocks
        if is_prompt and not is_here:
            incoming.append(leg)
        elif since_ns > seen_ns:
            hidden.append(leg)
        elif since_ns > seen_ns - SETTLE_MS * NS_PER_MS:
            maybe.append((since_ns, leg))
        else:
            num_settled += 1
    maybe.sort(key=lambda item: item[0])  # of equals, the last that was told of is the newest
    hidden = [leg for _, leg in maybe[max(0, seen_seqs - num_settled) :]] + hidden
    prefills = [leg.burden for leg in hidden if leg.state is ReservationState.PREFILLING]
    decodes = [leg.burden for leg in (*hidden, *incoming) if leg.decode_at == name]
    limits = [leg.burden.tpot_limit_ms for leg in everything if leg.decode_at == name]
    head = legs.head
    pending = PendingLoad(
        decode_seqs=len(decodes),
        decode_context_tokens=sum(burden.context_tokens for burden in decodes),
        decode_blocks=num_blocks,
        tightest_tpot_ms=min(limits, default=NO_LIMIT),
        prompts_ms=sum(leg.burden.prefill_ms for leg in legs.prompts.values()),
        head_ms=head.burden.prefill_ms if head is not None else 0.0,
        head_since_ns=legs.pending.head_since_ns,
    )
    return pending, prefills


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(TTL_MS)
        self.now_ns = 0
        self.open: dict[DecisionId, tuple[InstanceId, InstanceId, bool]] = {}
        self.count = 0
        self.reports: dict[InstanceId, tuple[int, int]] = {}  # when, and of how many sequences
        self.known = dict.fromkeys(INSTANCES, PendingLoad())  # what is pending, as it was last read

    @rule(prefill=st.sampled_from(INSTANCES), decode=st.sampled_from(DECODES))
    def reserve(self, prefill: InstanceId, decode: InstanceId) -> None:
        self.count += 1
        decision = DecisionId(str(self.count))
        prefill_at = prefill if prefill in PREFILLS else decode
        limit_ms = NO_LIMIT if self.count % 3 else 20.0 + self.count % 5
        burden = Burden(10 * self.count, self.count / 7, 90 + self.count, 3, limit_ms)
        self.ledger.reserve(decision, prefill_at, decode, burden, self.now_ns)
        self.open[decision] = (prefill_at, decode, False)

    @rule(pick=st.integers(0, 100))
    def first_token(self, pick: int) -> None:
        decision = DecisionId(str(pick % (self.count + 1)))
        result = self.ledger.first_token(decision, self.now_ns)
        prefill, decode, is_decoding = self.open.get(decision, (None, None, True))
        assert (result is None) == is_decoding
        if prefill is not None and decode is not None:
            self.open[decision] = (prefill, decode, True)

    @rule(pick=st.integers(0, 100))
    def end(self, pick: int) -> None:
        decision = DecisionId(str(pick % (self.count + 1)))
        assert (self.ledger.end(decision, self.now_ns) is not None) == (decision in self.open)
        self.open.pop(decision, None)
        assert self.ledger.end(decision, self.now_ns) is None

    @rule(
        instance=st.sampled_from(INSTANCES),
        num_seqs=st.integers(0, 10),
        num_prompts=st.none() | st.integers(0, 10),
        age_ms=st.sampled_from([0, 0, 3]),
    )
    def report(
        self, instance: InstanceId, num_seqs: int, num_prompts: int | None, age_ms: int
    ) -> None:
        came_ns = max(self.now_ns - age_ms * NS_PER_MS, self.reports.get(instance, (0, 0))[0])
        num_prompts = min(num_prompts, num_seqs) if num_prompts is not None else None
        self.ledger.seen(instance, num_seqs, came_ns, num_prompts)
        self.reports[instance] = came_ns, num_seqs
        after = self.ledger.pending(instance)
        visible = [
            leg
            for leg in self._legs(instance)
            if leg.prefill_at == instance or leg.state is ReservationState.DECODING
        ]
        incoming = sum(
            decode == instance and prefill != instance and not is_decoding
            for prefill, decode, is_decoding in self.open.values()
            if instance in (prefill, decode)
        )
        # What the report speaks of and what is pending never add up to more than there is.
        since = [leg for leg in visible if max(leg.made_ns, leg.first_token_ns) > came_ns]
        assert after.decode_blocks == 0 or came_ns < self.now_ns
        hidden = max(len(since), len(visible) - num_seqs)
        assert len(self.ledger.unreported(instance)) <= hidden
        assert after.decode_seqs <= hidden + incoming

    @rule(instance=st.sampled_from(INSTANCES))
    def lose(self, instance: InstanceId) -> None:
        self.ledger.forget(instance)
        self.reports.pop(instance, None)
        assert self.ledger.pending(instance) == PendingLoad()
        assert self.ledger.unreported(instance) == []

    @rule(ms=st.one_of(st.integers(1, 5), st.integers(1, 3_000)))
    def time_passes(self, ms: int) -> None:
        self.now_ns += ms * NS_PER_MS
        for reservation in self.ledger.expire(self.now_ns):
            del self.open[reservation.decision_id]

    def _legs(self, instance: InstanceId):
        return [
            leg
            for legs in [self.ledger._legs.get(instance)]
            if legs
            for kind in (legs.incoming, legs.recent, legs.settled)
            for leg in kind.values()
        ]

    @invariant()
    def is_sound(self) -> None:
        assert len(self.ledger) == len(self.open)
        for instance in INSTANCES:
            pending = self.ledger.pending(instance)
            assert pending == self.known[instance] or instance in self.ledger.changed
            self.known[instance] = pending
            assert (
                min(
                    pending.decode_seqs,
                    pending.decode_context_tokens,
                    pending.decode_blocks,
                    pending.prompts_ms,
                    pending.num_strange,
                )
                >= 0
            )
            assert pending.head_ms <= pending.prompts_ms
            legs = self.ledger._legs.get(instance)
            if legs is not None:
                seen_ns, seen_seqs = self.reports.get(instance, (-1, 0))
                wanted, unreported = added_up(legs, seen_ns, seen_seqs)
                assert replace(pending, num_strange=0) == wanted
                assert self.ledger.unreported(instance)[::-1] == unreported
                work_ms = sum(burden.prefill_ms for burden in unreported)
                assert self.ledger.unreported_ms(instance) == pytest.approx(work_ms)
        self.ledger.changed.clear()
        self.ledger.check_integrity()

    def teardown(self) -> None:
        for decision in list(self.open):
            self.ledger.end(decision, self.now_ns)
        assert len(self.ledger) == 0
        for instance in INSTANCES:
            assert replace(self.ledger.pending(instance), num_strange=0) == PendingLoad()
        self.ledger.check_integrity()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_ended_reservations_lead_nowhere() -> None:
    assert RESERVATION_TRANSITIONS.is_terminal(ReservationState.ENDED)
    assert all(
        RESERVATION_TRANSITIONS.can(state, ReservationState.ENDED)
        for state in ReservationState
        if state is not ReservationState.ENDED
    )
