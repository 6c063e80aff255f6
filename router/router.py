"""The decision: filter, predict, rank, reserve. Pure CPU, no I/O, no token ids.

``submit`` may hold a query (policy ``goodput``; see ``verdict`` for how to use it), ``route`` never
waits: it answers from the last view or raises a typed error with a time to retry. Every decision
holds a reservation from the moment it is made until its outcome is reported or the reservation
expires, so that a burst does not all go to whoever was idle in the last report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.cluster import Role
from isthmus.common.config import RouterConfig
from isthmus.common.errors import InfeasibleSloError, IsthmusError
from isthmus.common.ids import DecisionId, InstanceId, RequestId, new_decision_id
from isthmus.common.types import InstanceRef, RouteAction, RouteDecision
from isthmus.router.admission import FilterReason, filter_reason, overload, refusal
from isthmus.router.baselines import least_loaded, power_of_two, prefix_only, round_robin
from isthmus.router.cluster_view import ClusterView
from isthmus.router.end_target import bounded_by_end
from isthmus.router.explain import MAX_FILTERED, DecisionLog, DecisionRecord
from isthmus.router.feedback import Feedback
from isthmus.router.goodput import GoodputPolicy
from isthmus.router.holding import HoldingQueue
from isthmus.router.intake import Intake
from isthmus.router.knowledge import Knowledge
from isthmus.router.pairing import CompatKey
from isthmus.router.placement import Look, Placement
from isthmus.router.policy import Candidate, LeastPredictedLoad, Policy, Pool
from isthmus.router.predictor import (
    DecodeOption,
    Predictor,
    PrefillOption,
    burden,
    quickest_of,
)
from isthmus.router.sessions import Sessions
from isthmus.router.shares import TenantShares
from isthmus.router.snapshot import RouterSnapshot, take_snapshot
from isthmus.router.state import RouterState
from isthmus.router.types import Outcome, RouteQuery
from isthmus.router.verdict import Admitted, Rejected, Settled, Verdict

# Looking up an enum's member costs as much as the rest of a filter does.
_PREFILL = Role.PREFILL


class Router:
    """``tenant_weights``: of tenants whose share of the work is not 1.

    ``on_progress`` is called whenever a ``tick`` may settle something (see ``verdict``).
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        policy: Policy | None = None,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._policy = policy or create_policy(config)
        self._turn = 0
        self._id_prefix = f"{new_decision_id()}-"  # no other router's
        self.state = RouterState(config, clock)
        self._predictor = Predictor(config.stale_load_ms, self.state.links)
        self.log = DecisionLog()
        self.sessions = Sessions(config.max_sessions, config.session_affinity_ms)
        self.knowledge = Knowledge(self.state.links)
        self.feedback = Feedback(self.state, self._predictor, self.knowledge)
        self.on_progress: Callable[[], None] | None = None
        is_goodput = policy is None and config.policy == GoodputPolicy.name
        self._intake = self._late_binding(tenant_weights) if is_goodput else None
        if self._intake is not None:  # else nobody waits for news
            self.state.on_news = self._progress
        self._num_decisions = {
            path: metrics.DECISIONS.labels(policy=self.policy_name, path=path)
            for path in ("local", "disaggregated")
        }

    @property
    def cluster(self) -> ClusterView:
        return self.state.cluster

    def snapshot(self) -> RouterSnapshot:
        return take_snapshot(self.state, self.policy_name, self._clock.monotonic_ns())

    @property
    def policy_name(self) -> str:
        return self._policy.name if self._intake is None else GoodputPolicy.name

    @property
    def num_held(self) -> int:
        return len(self._intake.queue) if self._intake is not None else 0

    # --- the seam of ``verdict`` -----------------------------------------------------------------

    def submit(self, query: RouteQuery) -> Verdict:
        """Decides, holds or refuses, with InvalidRequestError what is held already by its id."""
        if self._intake is None:
            try:
                return Admitted(self.route(query))
            except IsthmusError as error:
                return Rejected(error)
        now_ns = self._clock.monotonic_ns()
        self.feedback.expire(now_ns)
        return self._settled_at_once(query, self._intake, now_ns)

    def tick(self) -> list[Settled]:
        """Those held whose wait is over."""
        now_ns = self._clock.monotonic_ns()
        self.feedback.expire(now_ns)
        if self._intake is None:
            return []
        settled = self._intake.tick(now_ns)
        metrics.QUERIES_HELD.set(len(self._intake.queue))
        return settled

    def next_tick_ns(self) -> int | None:
        """Monotonic time by which to call ``tick`` again; None = not before there is news."""
        return self._intake.next_tick_ns() if self._intake is not None else None

    def cancel(self, request_id: RequestId) -> bool:
        """Nothing more is said about a held query. False when it is not held (any more)."""
        return self._intake is not None and self._intake.cancel(request_id)

    # --- at once ---------------------------------------------------------------------------------

    def route(self, query: RouteQuery) -> RouteDecision:
        """Chooses and reserves.

        Raises NoInstanceError or CapacityError (with a time to retry), ContextLengthError when the
        prompt can never fit, ModelNotFoundError.
        """
        now_ns = self._clock.monotonic_ns()
        self.feedback.expire(now_ns)
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
        others = pool.prefills.get(candidates[0].decode.view.key, ())
        decision = self._commit(query, candidates, now_ns, RouteAction.ADMIT, others)
        self.log.add(record.decided(decision, candidates))
        return decision

    def reroute(self, query: RouteQuery, failed: InstanceId, reason: str) -> RouteDecision:
        """A new decision that avoids ``failed`` as well. Report the old decision's outcome too."""
        decision = self.route(replace(query, exclude=query.exclude | {failed}))
        return replace(decision, reason=f"again without {failed} ({reason}); {decision.reason}")

    def report(self, decision_id: DecisionId, outcome: Outcome) -> None:
        """Tells what became of a decision: frees the ledger, feeds breakers and corrections.

        Unknown, expired and already ended decisions are fine; then only blame is taken from it.
        """
        record = self.log.get(decision_id)
        if record is not None:
            record.told(outcome)
        self.feedback.report(decision_id, outcome, self._clock.monotonic_ns())
        self._progress()

    def is_open(self, decision_id: DecisionId) -> bool:
        """Whether it holds a reservation: neither ended nor expired."""
        return decision_id in self.feedback

    # --- deciding ------------------------------------------------------------------------------

    def _pool(
        self, query: RouteQuery, filtered: dict[InstanceId, FilterReason], now_ns: int
    ) -> Pool:
        depths = self.state.index.match(query.hash_chains)
        pending, unreported_ms = self.state.ledger.pending, self.state.ledger.unreported_ms
        prefill_option = self._predictor.prefill_option
        decode_option = self._predictor.decode_option
        decodes: list[DecodeOption] = []
        prefills: dict[CompatKey, list[PrefillOption]] = {}
        for instance_id, view in self.cluster.views.items():
            reason = filter_reason(view, query, now_ns)
            if reason is not None:
                filtered[instance_id] = reason
                continue
            depth = depths.get(instance_id, 0)
            if view.info.role is _PREFILL:
                if not view.fed_keys:
                    filtered[instance_id] = FilterReason.INCOMPATIBLE
                    continue
                unreported = unreported_ms(instance_id)
                prefill = prefill_option(view, unreported, query, depth, now_ns)
                for key in view.fed_keys:
                    prefills.setdefault(key, []).append(prefill)
            else:
                load = pending(instance_id)
                decodes.append(decode_option(view, load, query, depth, now_ns))
        decodes = _with_room(decodes, filtered)
        decodes = _preferred(decodes, query.prefer_decode, filtered)
        prefills = _paired(prefills, decodes, filtered)

        quickest = {key: quickest_of(options) for key, options in prefills.items()}

        def local(decode: DecodeOption) -> PrefillOption:
            unreported = unreported_ms(decode.view.instance_id)
            rival = quickest.get(decode.view.key)
            return self._predictor.local_option(decode, unreported, query, now_ns, rival)

        def fetched(decode: DecodeOption, prefill: PrefillOption) -> PrefillOption:
            return self._predictor.fetched_option(decode, prefill, query)

        last = self.sessions.last(query)
        minimum = self._config.min_remote_tokens
        transfer_ms = self._predictor.transfer_ms
        return Pool(prefills, decodes, local, fetched, transfer_ms, minimum, last)

    def _commit(
        self,
        query: RouteQuery,
        candidates: Sequence[Candidate],
        now_ns: int,
        action: RouteAction,
        others: Sequence[PrefillOption] = (),
        *,
        is_infeasible: bool = False,
    ) -> RouteDecision:
        """``is_infeasible``: served though no instance, however idle, meets its targets, and nobody
        need spare it. The decision's ``reason`` begins with that, or with its being late."""
        chosen = candidates[0]
        tag = "late: " if action is RouteAction.DEGRADE else ""
        if is_infeasible:
            tag = f"{InfeasibleSloError.code}: "
        decode, prefill = chosen.decode.view, chosen.prefill.view
        decision = RouteDecision(
            decision_id=DecisionId(f"{self._id_prefix}{self._turn:x}"),
            request_id=query.request_id,
            action=action,
            decode=decode.ref,
            prefill=None if chosen.is_local else prefill.ref,
            alternate=None if chosen.is_local else _alternate(candidates, others),
            local_reason=chosen.local_reason,
            cached_tokens=chosen.prefill.cached_tokens,
            predicted_ttft_ms=chosen.prefill.ttft_ms,
            predicted_tpot_ms=chosen.decode.tpot_ms,
            policy=self.policy_name,
            reason=f"{tag}first of {len(candidates)} candidates",
            expires_ns=self._clock.now_ns() + self._config.reservation_ttl_ms * NS_PER_MS,
        )
        output_tokens = self._output_tokens(query)
        self.state.ledger.reserve(
            decision.decision_id,
            prefill.instance_id,
            decode.instance_id,
            burden(
                query, chosen.prefill, chosen.decode, output_tokens, is_spared=not is_infeasible
            ),
            now_ns,
        )
        served_by = None if chosen.is_local else prefill.instance_id
        self.sessions.served(query, served_by, decode.instance_id)
        self._turn += 1
        for view in (decode, prefill):
            view.last_chosen = self._turn
            view.breaker.dispatched(decision.decision_id, now_ns)
        elapsed_ms = query.elapsed_ms(self._clock.now_ns())
        self.feedback.opened(decision, query, chosen, elapsed_ms, now_ns)
        if decode.load is None or prefill.load is None:
            metrics.ROUTE_FALLBACK.inc()
        self._num_decisions["local" if chosen.is_local else "disaggregated"].inc()
        metrics.RESERVATIONS.set(len(self.state.ledger))
        return decision

    def _output_tokens(self, query: RouteQuery) -> int:
        return self.knowledge.lengths.expected(
            query.model, query.slo.class_name, query.num_prompt_tokens, query.max_output_tokens
        )

    # --- late binding ----------------------------------------------------------------------------

    def _late_binding(self, tenant_weights: Mapping[str, float] | None) -> Intake:
        config = self._config
        policy = GoodputPolicy(config.stale_load_ms, config.min_remote_tokens, config.exploration)
        queue = HoldingQueue(TenantShares(tenant_weights), config.ageing_ms, config.max_held)
        places = Placement(self.state, self.knowledge, policy, self.sessions, self._clock)
        return Intake(queue, places, self._bind, self._refuse, config.ageing_ms)

    def _settled_at_once(self, query: RouteQuery, intake: Intake, now_ns: int) -> Verdict:
        deadline_ns = None
        if query.deadline_ns:
            deadline_ns = now_ns + query.deadline_ns - self._clock.now_ns()
        bounded = bounded_by_end(query, self._output_tokens(query), self.state)
        verdict = intake.submit(bounded, deadline_ns, now_ns)
        metrics.QUERIES_HELD.set(len(intake.queue))
        return verdict

    def _bind(
        self, query: RouteQuery, look: Look, action: RouteAction, now_ns: int
    ) -> RouteDecision:
        candidates = look.weighed.candidates
        # Before the commitment: a probe that it sends closes the breaker to everybody else.
        record = DecisionRecord.of(query, self._left_out(query, now_ns), self._clock.now_ns())
        decision = self._commit(query, candidates, now_ns, action, is_infeasible=look.is_infeasible)
        self.log.add(record.decided(decision, candidates))
        return decision

    def _left_out(self, query: RouteQuery, now_ns: int) -> dict[InstanceId, FilterReason]:
        """For an explanation; not in clusters where looking would cost as much as deciding."""
        views = self.cluster.views
        if len(views) > MAX_FILTERED:
            return {}
        reasons = {name: filter_reason(view, query, now_ns) for name, view in views.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def _refuse(self, query: RouteQuery, error: IsthmusError | None, now_ns: int) -> IsthmusError:
        """Notes a refusal. ``error`` None: nobody could take it, for a reason to be found."""
        filtered: dict[InstanceId, FilterReason] = {}
        if error is None:
            self._pool(query, filtered, now_ns)
            views = self.cluster.by_role(Role.DECODE, Role.MIXED)
            error = refusal(query, views, filtered, now_ns)
        self.log.add(DecisionRecord.of(query, filtered, self._clock.now_ns()).refused(error))
        return error

    def _progress(self) -> None:
        if self.on_progress is not None and self.num_held:
            self.on_progress()


def create_policy(config: RouterConfig) -> Policy:
    policies: Mapping[str, Policy] = {
        "least_predicted_load": LeastPredictedLoad(),
        "round_robin": round_robin(),
        "least_loaded": least_loaded(),
        "power_of_two": power_of_two(),
        "prefix_only": prefix_only(),
        # What does not wait (a retry, a stream that is resumed) goes where it ends soonest.
        GoodputPolicy.name: LeastPredictedLoad(),
    }
    return policies[config.policy]


def _paired(
    prefills: dict[CompatKey, list[PrefillOption]],
    decodes: list[DecodeOption],
    filtered: dict[InstanceId, FilterReason],
) -> dict[CompatKey, list[PrefillOption]]:
    """Leaves out those that can fill the store of no decode instance that could be chosen."""
    wanted = {option.view.key for option in decodes}
    for options in prefills.values():
        for prefill in options:
            if wanted.isdisjoint(prefill.view.fed_keys):
                filtered[prefill.view.instance_id] = FilterReason.INCOMPATIBLE
    return {key: options for key, options in prefills.items() if key in wanted}


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


def _alternate(
    candidates: Sequence[Candidate], others: Sequence[PrefillOption]
) -> InstanceRef | None:
    """Who else could compute the prompt for the first candidate's decode instance: the policy's
    next choice or, where it named no other, whoever of ``others`` would be quickest."""
    first = candidates[0]
    for place in range(1, len(candidates)):
        other = candidates[place]
        is_pair = other.decode.view is first.decode.view and not other.is_local
        if is_pair and other.prefill.view is not first.prefill.view:
            return other.prefill.view.ref
    rest = [option for option in others if option.view is not first.prefill.view]
    return min(rest, key=lambda option: option.ttft_ms).view.ref if rest else None


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
