"""The decision: filter, predict, rank, reserve. Pure CPU, no I/O, no token ids.

``route`` never waits: it answers from the last view or raises a typed error with a time to retry.
Every decision holds a reservation from the moment it is made until its outcome is reported or the
reservation expires, so that a burst does not all go to whoever was idle in the last report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.cluster import Role
from isthmus.common.config import RouterConfig
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import DecisionId, InstanceId, RequestId, new_decision_id
from isthmus.common.types import InstanceRef, RouteAction, RouteDecision
from isthmus.router.admission import FilterReason, filter_reason, overload, refusal
from isthmus.router.baselines import least_loaded, round_robin
from isthmus.router.cluster_view import ClusterView, CompatKey, InstanceView
from isthmus.router.explain import DecisionLog, DecisionRecord
from isthmus.router.policy import Candidate, LeastPredictedLoad, Policy, Pool
from isthmus.router.predictor import (
    DecodeOption,
    Predictor,
    PrefillOption,
    burden,
    quickest_of,
)
from isthmus.router.snapshot import RouterSnapshot, take_snapshot
from isthmus.router.state import RouterState
from isthmus.router.types import Outcome, OutcomeKind, RouteQuery
from isthmus.router.verdict import Admitted, Rejected, Settled, Verdict

# Looking up an enum's member costs as much as the rest of a filter does.
_PREFILL = Role.PREFILL


@dataclass(frozen=True, slots=True)
class _Open:
    """A decision whose end is not known yet."""

    decision: RouteDecision
    prefill: InstanceRef  # where the prompt is computed, local or not
    decode: InstanceRef
    at_ns: int
    prefill_factor: float  # that the predictions contain
    decode_factor: float


class Router:
    def __init__(self, config: RouterConfig, clock: Clock, policy: Policy | None = None) -> None:
        self._config = config
        self._clock = clock
        self._policy = policy or create_policy(config)
        self._predictor = Predictor(config.stale_load_ms)
        self._open: dict[DecisionId, _Open] = {}
        self._turn = 0
        self.state = RouterState(config, clock)
        self.log = DecisionLog()
        self.on_progress: Callable[[], None] | None = None

    @property
    def cluster(self) -> ClusterView:
        return self.state.cluster

    def snapshot(self) -> RouterSnapshot:
        return take_snapshot(self.state, self._policy.name, self._clock.monotonic_ns())

    def route(self, query: RouteQuery) -> RouteDecision:
        """Chooses and reserves.

        Raises NoInstanceError or CapacityError (with a time to retry), ContextLengthError when the
        prompt can never fit, ModelNotFoundError.
        """
        now_ns = self._clock.monotonic_ns()
        self._expire(now_ns)
        filtered: dict[InstanceId, FilterReason] = {}
        pool = self._pool(query, filtered, now_ns)
        error: IsthmusError | None
        if pool.decodes:
            error = overload(pool.decodes)
        else:
            views = self.cluster.by_role(Role.DECODE, Role.MIXED)
            error = refusal(query, views, filtered, now_ns)
        record = DecisionRecord.of(query, filtered, self._clock.now_ns())
        if error is not None:
            self.log.add(record.refused(error))
            raise error
        candidates = self._policy.rank(query, pool)
        decision = self._commit(query, candidates, now_ns)
        self.log.add(record.decided(decision, candidates))
        return decision

    def submit(self, query: RouteQuery) -> Verdict:
        """As ``router.verdict`` describes. This router holds nobody: it decides at once."""
        try:
            return Admitted(self.route(query))
        except IsthmusError as error:
            return Rejected(error)

    def tick(self) -> list[Settled]:
        return []

    def next_tick_ns(self) -> int | None:
        return None

    def cancel(self, request_id: RequestId) -> None:
        """Nothing more is said about a query that is held; a no-op for any other."""

    def reroute(self, query: RouteQuery, failed: InstanceId, reason: str) -> RouteDecision:
        """A new decision that avoids ``failed`` as well. Report the old decision's outcome too."""
        decision = self.route(replace(query, exclude=query.exclude | {failed}))
        return replace(decision, reason=f"again without {failed} ({reason}); {decision.reason}")

    def report(self, decision_id: DecisionId, outcome: Outcome) -> None:
        """Tells what became of a decision: frees the ledger, feeds breakers and corrections.

        Unknown, expired and already ended decisions are fine; then only blame is taken from it.
        """
        now_ns = self._clock.monotonic_ns()
        record = self.log.get(decision_id)
        if record is not None:
            record.told(outcome)
        made = self._open.get(decision_id)
        if outcome.failed_instance is not None:
            self._blame(made, outcome.failed_instance, now_ns)
        if outcome.kind is OutcomeKind.FIRST_TOKEN:
            self._first_token(decision_id, made, now_ns)
            return
        if outcome.kind is OutcomeKind.FINISHED and made is not None:
            self._finished(made, outcome, now_ns)
        self._end(decision_id)

    # --- deciding ------------------------------------------------------------------------------

    def _pool(
        self, query: RouteQuery, filtered: dict[InstanceId, FilterReason], now_ns: int
    ) -> Pool:
        # Chains of unlike blocks share no hash, so an instance is found by its own kind at most.
        depths: dict[InstanceId, int] = {}
        for chain in query.hash_chains:
            depths |= self.state.index.match(chain)
        pending = self.state.ledger.pending
        prefill_option = self._predictor.prefill_option
        decode_option = self._predictor.decode_option
        decodes: list[DecodeOption] = []
        prefills: dict[CompatKey, list[PrefillOption]] = {}
        for instance_id, view in self.cluster.views.items():
            reason = filter_reason(view, query, now_ns)
            if reason is not None:
                filtered[instance_id] = reason
                continue
            load, depth = pending(instance_id), depths.get(instance_id, 0)
            if view.info.role is _PREFILL:
                prefill = prefill_option(view, load, query, depth, now_ns)
                prefills.setdefault(view.key, []).append(prefill)
            else:
                decodes.append(decode_option(view, load, query, depth, now_ns))
        decodes = _with_room(decodes, filtered)
        decodes = _preferred(decodes, query.prefer_decode, filtered)
        for key in prefills.keys() - {option.view.key for option in decodes}:
            for prefill in prefills.pop(key):
                filtered[prefill.view.instance_id] = FilterReason.INCOMPATIBLE

        quickest = {key: quickest_of(options) for key, options in prefills.items()}

        def local(decode: DecodeOption) -> PrefillOption:
            load = pending(decode.view.instance_id)
            rival = quickest.get(decode.view.key)
            return self._predictor.local_option(decode, load, query, now_ns, rival)

        return Pool(prefills, decodes, local, self._config.min_remote_tokens)

    def _commit(self, query: RouteQuery, candidates: list[Candidate], now_ns: int) -> RouteDecision:
        chosen = candidates[0]
        decode, prefill = chosen.decode.view, chosen.prefill.view
        decision = RouteDecision(
            decision_id=new_decision_id(),
            request_id=query.request_id,
            action=RouteAction.ADMIT,
            decode=decode.info.ref,
            prefill=None if chosen.is_local else prefill.info.ref,
            alternate=None if chosen.is_local else _alternate(candidates),
            local_reason=chosen.local_reason,
            cached_tokens=chosen.prefill.cached_tokens,
            predicted_ttft_ms=chosen.prefill.ttft_ms,
            predicted_tpot_ms=chosen.decode.tpot_ms,
            policy=self._policy.name,
            reason=f"first of {len(candidates)} candidates",
            expires_ns=self._clock.now_ns() + self._config.reservation_ttl_ms * NS_PER_MS,
        )
        self.state.ledger.reserve(
            decision.decision_id,
            prefill.instance_id,
            decode.instance_id,
            burden(query, chosen.prefill, chosen.decode),
            now_ns,
        )
        self._turn += 1
        for view in (decode, prefill):
            view.last_chosen = self._turn
            view.breaker.dispatched(decision.decision_id, now_ns)
        self._open[decision.decision_id] = _Open(
            decision,
            prefill.info.ref,
            decode.info.ref,
            now_ns,
            chosen.prefill.factor,
            decode.decode_factor,
        )
        if decode.load is None or prefill.load is None:
            metrics.ROUTE_FALLBACK.inc()
        path = "local" if chosen.is_local else "disaggregated"
        metrics.DECISIONS.labels(policy=self._policy.name, path=path).inc()
        metrics.RESERVATIONS.set(len(self.state.ledger))
        return decision

    # --- learning ------------------------------------------------------------------------------

    def _first_token(self, decision_id: DecisionId, made: _Open | None, now_ns: int) -> None:
        if made is None or self.state.ledger.first_token(decision_id, now_ns) is None:
            return
        view = self._view(made.prefill)
        if view is not None:
            measured_ms = (now_ns - made.at_ns) / NS_PER_MS
            predicted_ms = made.decision.predicted_ttft_ms
            self._predictor.observe_ttft(view, predicted_ms, made.prefill_factor, measured_ms)

    def _finished(self, made: _Open, outcome: Outcome, now_ns: int) -> None:
        """Credits both legs. Not before the end: only then is it known who computed the prompt."""
        for ref in {made.prefill, made.decode}:
            view = self._view(ref)
            if view is not None and ref.instance_id != outcome.failed_instance:
                view.breaker.succeeded(now_ns)
        decode = self._view(made.decode)
        if decode is not None and outcome.tpot_ms is not None:
            predicted_ms = made.decision.predicted_tpot_ms
            factor = made.decode_factor
            self._predictor.observe_tpot(decode, predicted_ms, factor, outcome.tpot_ms)

    def _blame(self, made: _Open | None, failed: InstanceId, now_ns: int) -> None:
        """Only the epoch that failed: whoever restarted meanwhile is not to blame."""
        legs = (made.prefill, made.decode) if made is not None else ()
        ref = next((leg for leg in legs if leg.instance_id == failed), None)
        view = self.cluster.get(failed) if ref is None else self._view(ref)
        if view is not None:
            view.breaker.failed(now_ns)

    def _end(self, decision_id: DecisionId) -> None:
        self.state.ledger.end(decision_id)
        made = self._open.pop(decision_id, None)
        for ref in (made.prefill, made.decode) if made is not None else ():
            view = self._view(ref)
            if view is not None:
                view.breaker.released(decision_id)
        metrics.RESERVATIONS.set(len(self.state.ledger))

    def _expire(self, now_ns: int) -> None:
        for reservation in self.state.ledger.expire(now_ns):
            self._end(reservation.decision_id)

    def _view(self, ref: InstanceRef) -> InstanceView | None:
        return self.cluster.at_epoch(ref.instance_id, ref.epoch)


def create_policy(config: RouterConfig) -> Policy:
    policies: Mapping[str, Policy] = {
        "least_predicted_load": LeastPredictedLoad(),
        "round_robin": round_robin(),
        "least_loaded": least_loaded(),
    }
    return policies[config.policy]


def _with_room(
    options: list[DecodeOption], filtered: dict[InstanceId, FilterReason]
) -> list[DecodeOption]:
    """Leaves out full instances while others have room; when none has, all stay and queue."""
    roomy = [option for option in options if not option.is_full]
    if not roomy or len(roomy) == len(options):
        return options
    for option in options:
        if option.is_full:
            filtered[option.view.instance_id] = FilterReason.FULL
    return roomy


def _alternate(candidates: list[Candidate]) -> InstanceRef | None:
    """Who else could compute the prompt for the first candidate's decode instance: the best."""
    first = candidates[0]
    return next(
        (
            other.prefill.view.info.ref
            for other in candidates[1:]
            if not other.is_local
            and other.decode.view is first.decode.view
            and other.prefill.view is not first.prefill.view
        ),
        None,
    )


def _preferred(
    options: list[DecodeOption],
    preferred: InstanceId | None,
    filtered: dict[InstanceId, FilterReason],
) -> list[DecodeOption]:
    """Only the preferred instance, when it passed every filter."""
    if preferred is None or not any(o.view.instance_id == preferred for o in options):
        return options
    for option in options:
        if option.view.instance_id != preferred:
            filtered[option.view.instance_id] = FilterReason.NOT_PREFERRED
    return [option for option in options if option.view.instance_id == preferred]
