"""What one instance carries of this router's reservations, and how much of it its reports lack.

A remote decode leg becomes *visible* to its instance's reports at the first token, every other leg
when it is made. So that nothing is counted twice, the pending load of an instance is what its last
report cannot contain: incoming legs, legs that became visible after the report came, and, of those
that became visible shortly before it (``SETTLE_MS``: they may have been on their way), the newest
ones that exceed the number of sequences the report speaks of. Older ones are surely in it: they are
only counted. Legs are kept in the order in which they became visible, and sums that are kept are of
whole numbers, so that they cannot drift; times are added up anew when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import DecisionId, InstanceId
from isthmus.router.pending import LegSum, PendingLoad
from isthmus.router.reservation import NO_LIMIT, Burden, Reservation, ReservationState

SETTLE_MS = 1_000
_NEVER_SEEN_NS = -1
# Looked up per leg and sum; an enum's member costs more to find than to compare.
_PREFILLING = ReservationState.PREFILLING
LegsById = dict[DecisionId, Reservation]


@dataclass(slots=True)
class Legs:
    """Of one instance, with what its last report said. ``incoming``: prompts are computed
    elsewhere; ``recent``: visible, in that order; ``settled``: surely in its reports."""

    instance_id: InstanceId
    incoming: LegsById = field(default_factory=dict)
    recent: LegsById = field(default_factory=dict)
    settled: LegsById = field(default_factory=dict)
    prompts: LegsById = field(default_factory=dict)  # computed here, oldest first
    # Prompts that reports leave out, oldest first; all are older than ``prompts``.
    forgotten: LegsById = field(default_factory=dict)
    _limits: dict[float, int] = field(default_factory=dict)  # TPOT limit → decode legs that have it
    _incoming_context: int = 0
    _recent_sum: LegSum = field(default_factory=LegSum)
    _new_sum: LegSum = field(
        default_factory=LegSum
    )  # of those of them that no report can contain yet
    _new_blocks: int = 0  # of decode legs made since then, visible or not
    _seen_ns: int = _NEVER_SEEN_NS  # when the last report came …
    _seen_seqs: int = 0  # … of how many sequences it speaks …
    _num_strange: int = 0  # … and how many of them are not this router's
    _prompt_done_ns: int = 0  # when the last prompt was done, or given up
    _pending: PendingLoad | None = None  # None = to be added up …
    _unreported_ms: float | None = None  # … each when it is asked for

    def __len__(self) -> int:
        return len(self.incoming) + len(self.recent) + len(self.settled)

    def __contains__(self, decision_id: DecisionId) -> bool:
        recent, settled, incoming = self.recent, self.settled, self.incoming
        return decision_id in recent or decision_id in settled or decision_id in incoming

    @property
    def head(self) -> Reservation | None:
        """The prompt that is computed, if any is."""
        return next(iter(self.prompts.values())) if self.prompts else None

    @property
    def pending(self) -> PendingLoad:
        if self._pending is None:
            self._pending = self._sum()
        return self._pending

    @property
    def unreported(self) -> list[Burden]:
        """Of prompts that are computed here: those that the last report cannot contain."""
        hidden = islice(reversed(self.recent.values()), self._num_hidden())
        return [leg.burden for leg in hidden if leg.state is _PREFILLING]

    @property
    def unreported_ms(self) -> float:
        if self._unreported_ms is None:
            self._unreported_ms = sum([burden.prefill_ms for burden in self.unreported])
        return self._unreported_ms

    def add(self, leg: Reservation) -> None:
        if leg.prefill_at == self.instance_id:
            self.prompts[leg.decision_id] = leg
            self._show(leg)
        else:
            self.incoming[leg.decision_id] = leg
            self._incoming_context += leg.burden.context_tokens
        if leg.decode_at == self.instance_id:
            limit = leg.burden.tpot_limit_ms
            if limit != NO_LIMIT:
                self._limits[limit] = self._limits.get(limit, 0) + 1
            if leg.made_ns > self._seen_ns:
                self._new_blocks += leg.burden.blocks
        self._pending = self._unreported_ms = None

    def arrive(self, leg: Reservation) -> bool:
        """Its prompt, which was computed elsewhere, has its first token. No earlier report can
        contain it, so it is pending all the same, but it has come. Returns whether what is pending
        may have changed: when a report came at the same time."""
        if self.incoming.pop(leg.decision_id, None) is None:
            return False
        self._incoming_context -= leg.burden.context_tokens
        self._show(leg)
        if leg.first_token_ns > self._seen_ns:
            return False
        self._pending = None
        return True

    def computed(self, leg: Reservation, now_ns: int) -> None:
        """A prompt that was computed here has its first token."""
        if leg.decision_id in self:  # else it is of an earlier epoch
            self._prompt_done_ns = now_ns
            if leg.is_local:
                self._drop_prompt(leg)
            else:
                self._drop(leg)

    def end(self, leg: Reservation, now_ns: int) -> bool:
        """False when it was not there (any more)."""
        if self.head is leg:
            # The next prompt begins now at the earliest: it has not been delayed till here.
            self._prompt_done_ns = now_ns
        return self._drop(leg)

    def report(self, num_seqs: int, now_ns: int, num_prompts: int | None) -> None:
        """As ``Ledger.seen``."""
        num_known = len(self)
        if num_known:
            num_prompts = num_seqs if num_prompts is None else num_prompts
            if self._forget_prompts(num_prompts, now_ns):
                self._prompt_done_ns = now_ns
        self._seen_ns, self._seen_seqs = now_ns, num_seqs
        self._num_strange = max(0, num_seqs - num_known)
        self._count_new()
        self._settle()
        self._pending = self._unreported_ms = None

    def check_integrity(self) -> None:
        """AssertionError when what is kept disagrees."""
        kinds = (self.incoming, self.recent, self.settled)
        everything = [leg for kind in kinds for leg in kind.values()]
        assert len({leg.decision_id for leg in everything}) == len(everything)
        assert all(leg.state is _PREFILLING for leg in self.incoming.values())
        assert all(leg.prefill_at != self.instance_id for leg in self.incoming.values())
        shown = [self._since_ns(leg) for leg in self.recent.values()]
        assert shown == sorted(shown)
        assert self.forgotten.keys().isdisjoint(self.prompts)
        ages = [leg.made_ns for kind in (self.forgotten, self.prompts) for leg in kind.values()]
        assert ages == sorted(ages)
        assert self.prompts.keys() | self.forgotten.keys() == {
            leg.decision_id
            for leg in everything
            if leg.prefill_at == self.instance_id and leg.state is _PREFILLING
        }
        decodes = [leg for leg in everything if leg.decode_at == self.instance_id]
        limits = [leg.burden.tpot_limit_ms for leg in decodes]
        limits = [limit for limit in limits if limit != NO_LIMIT]
        assert self._limits == {limit: limits.count(limit) for limit in limits}
        context = sum(leg.burden.context_tokens for leg in self.incoming.values())
        assert self._incoming_context == context
        new = [leg for leg in self.recent.values() if self._since_ns(leg) > self._seen_ns]
        assert self._recent_sum == self._sum_of(self.recent.values())
        assert self._new_sum == self._sum_of(new)

    def _since_ns(self, leg: Reservation) -> int:
        """When it became visible."""
        return leg.made_ns if leg.prefill_at == self.instance_id else leg.first_token_ns

    def _show(self, leg: Reservation) -> None:
        self.recent[leg.decision_id] = leg
        self._count(leg, 1)

    def _count(self, leg: Reservation, sign: int) -> None:
        """One more, or one less, of ``recent``."""
        is_decode = leg.decode_at == self.instance_id
        self._recent_sum.count(leg, sign, is_decode=is_decode)
        if self._since_ns(leg) > self._seen_ns:
            self._new_sum.count(leg, sign, is_decode=is_decode)

    def _count_new(self) -> None:
        """Anew: mostly there are none, as a report that has just come is newer than all."""
        self._new_sum, self._new_blocks, seen_ns = LegSum(), 0, self._seen_ns
        for leg in reversed(self.recent.values()):
            if self._since_ns(leg) <= seen_ns:
                break
            is_decode = leg.decode_at == self.instance_id
            self._new_sum.count(leg, 1, is_decode=is_decode)
            if is_decode and leg.made_ns > seen_ns:
                self._new_blocks += leg.burden.blocks
        for leg in reversed(self.incoming.values()):
            if leg.made_ns <= seen_ns:
                break
            self._new_blocks += leg.burden.blocks

    def _drop_prompt(self, leg: Reservation) -> None:
        self.prompts.pop(leg.decision_id, None)
        self.forgotten.pop(leg.decision_id, None)
        self._pending = self._unreported_ms = None

    def _drop(self, leg: Reservation) -> bool:
        decision_id = leg.decision_id
        if self.recent.pop(decision_id, None) is not None:
            self._count(leg, -1)
        elif self.incoming.pop(decision_id, None) is not None:
            self._incoming_context -= leg.burden.context_tokens
        elif self.settled.pop(decision_id, None) is None:
            return False
        self._drop_prompt(leg)
        if leg.decode_at == self.instance_id:
            limit = leg.burden.tpot_limit_ms
            if limit != NO_LIMIT:
                self._limits[limit] -= 1
                if not self._limits[limit]:
                    del self._limits[limit]
            if leg.made_ns > self._seen_ns:
                self._new_blocks -= leg.burden.blocks
        return True

    def _forget_prompts(self, num_prompts: int, now_ns: int) -> bool:
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

    def _settle(self) -> None:
        settled_ns = self._seen_ns - SETTLE_MS * NS_PER_MS
        settled: list[Reservation] = []
        for leg in self.recent.values():
            if self._since_ns(leg) > settled_ns:
                break
            settled.append(leg)
        for leg in settled:
            self.settled[leg.decision_id] = self.recent.pop(leg.decision_id)
            self._count(leg, -1)

    def _sum(self) -> PendingLoad:
        hidden, head = self._hidden(), self.head
        return PendingLoad(
            hidden.decode_seqs + len(self.incoming),
            hidden.context_tokens + self._incoming_context,
            # They are taken before the prompt is computed, so reports contain them early.
            self._new_blocks,
            min(self._limits) if self._limits else NO_LIMIT,
            sum([leg.burden.prefill_ms for leg in self.prompts.values()]),
            head.burden.prefill_ms if head is not None else 0.0,
            max(self._prompt_done_ns, head.made_ns) if head is not None else 0,
            self._num_strange,
        )

    def _num_hidden(self) -> int:
        """Legs that the last report cannot contain, the newest of ``recent``: those that came after
        it and, of those that may be in it, as many as are too many for it."""
        num_new = self._new_sum.num_legs
        num_maybe = self._recent_sum.num_legs - num_new
        excess = len(self.settled) + num_maybe - self._seen_seqs
        return num_new + (min(num_maybe, excess) if excess > 0 else 0)

    def _hidden(self) -> LegSum:
        recent, new, num_hidden = self._recent_sum, self._new_sum, self._num_hidden()
        if num_hidden == recent.num_legs or not recent.decode_seqs:
            return recent
        if num_hidden == new.num_legs:
            return new
        legs, num_shown = self.recent.values(), recent.num_legs - num_hidden
        if num_hidden <= num_shown:
            return self._sum_of(islice(reversed(legs), num_hidden))
        shown = self._sum_of(islice(legs, num_shown))
        return LegSum(
            num_hidden,
            recent.decode_seqs - shown.decode_seqs,
            recent.context_tokens - shown.context_tokens,
        )

    def _sum_of(self, legs: Iterable[Reservation]) -> LegSum:
        found, name = list(legs), self.instance_id
        contexts = [leg.burden.context_tokens for leg in found if leg.decode_at == name]
        return LegSum(len(found), len(contexts), sum(contexts))
