"""What became of decisions: frees the ledger, feeds breakers, corrections and what is predicted.

Owns the decisions whose end is not known yet, with what was promised for each. Memory ends with the
reservation: at its outcome or when it expires.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import DecisionId, InstanceId
from isthmus.common.pacing import PACE
from isthmus.common.types import InstanceRef, RouteAction, RouteDecision
from isthmus.router.cluster_view import InstanceView
from isthmus.router.knowledge import Knowledge
from isthmus.router.policy import Candidate
from isthmus.router.predictor import Predictor
from isthmus.router.prices import Stage
from isthmus.router.quantiles import Kind, Promise, bucket_of, scaled
from isthmus.router.state import RouterState
from isthmus.router.types import Outcome, OutcomeKind, RouteQuery

PUBLISH_MS = 1_000


@dataclass(slots=True)
class OpenDecision:
    """A decision whose end is not known yet. ``…_factor``: that the predictions contain;
    ``…_model_ms``: what the instance's model alone said of the prompt, and of a decode step among
    ``num_seqs`` like the request itself."""

    decision: RouteDecision
    query: RouteQuery
    prefill: InstanceRef  # where the prompt is computed, local or not
    decode: InstanceRef
    at_ns: int
    elapsed_ms: float  # from the arrival to the decision
    prefill_factor: float
    decode_factor: float
    cached_tokens: int
    uncached_tokens: int
    prefill_model_ms: float
    num_seqs: int
    step_model_ms: float
    ttft_ms: float  # from the decision: predicted, and as the class's quantile
    ttft_quantile_ms: float
    tpot_ms: float
    tpot_quantile_ms: float
    failed: frozenset[InstanceId] = frozenset()  # asked for the prompt in vain

    @property
    def counts_for_prices(self) -> bool:
        """Who is served although a target cannot be met says nothing about scarcity, or was counted
        when he was given up."""
        return self.decision.action is not RouteAction.DEGRADE

    @property
    def kind(self) -> Kind:
        return Kind.LOCAL_TTFT if self.prefill == self.decode else Kind.TTFT

    @property
    def ttft_promise(self) -> Promise:
        return self._promise(self.kind, self.ttft_ms, self.ttft_quantile_ms)

    @property
    def tpot_promise(self) -> Promise:
        return self._promise(Kind.TPOT, self.tpot_ms, self.tpot_quantile_ms)

    def _promise(self, kind: Kind, predicted_ms: float, promised_ms: float) -> Promise:
        bucket, quantile = bucket_of(self.query.num_prompt_tokens), self.query.slo.quantile
        return Promise(kind, bucket, quantile, predicted_ms, promised_ms)


class Feedback:
    def __init__(self, state: RouterState, predictor: Predictor, knowledge: Knowledge) -> None:
        self._state = state
        self._predictor = predictor
        self._knowledge = knowledge
        self._open: dict[DecisionId, OpenDecision] = {}
        self._publishes_ns = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, decision_id: DecisionId) -> bool:
        return decision_id in self._open

    def opened(
        self,
        decision: RouteDecision,
        query: RouteQuery,
        chosen: Candidate,
        elapsed_ms: float,
        now_ns: int,
    ) -> None:
        prefill, decode = chosen.prefill, chosen.decode
        size = prefill.uncached_tokens, prefill.cached_tokens
        if chosen.is_local and decode.num_seqs:
            decode.view.take_prompt(prefill.prefill_ms, now_ns)
        residuals, quantile = self._knowledge.residuals, query.slo.quantile
        bucket = bucket_of(query.num_prompt_tokens)
        kind = Kind.LOCAL_TTFT if chosen.is_local else Kind.TTFT
        self._open[decision.decision_id] = OpenDecision(
            decision,
            query,
            prefill.view.ref,
            decode.view.ref,
            now_ns,
            elapsed_ms,
            prefill.factor,
            decode.view.decode_factor,
            prefill.cached_tokens,
            prefill.uncached_tokens,
            prefill.view.latency.prefill_ms(*size),
            decode.num_seqs + 1,
            _step_model_ms(decode.view, query, decode.num_seqs + 1),
            prefill.ttft_ms,
            scaled(prefill.ttft_ms, residuals.ratio(kind, bucket, quantile, now_ns)),
            decode.tpot_ms,
            scaled(decode.tpot_ms, residuals.ratio(Kind.TPOT, bucket, quantile, now_ns)),
        )

    def report(self, decision_id: DecisionId, outcome: Outcome, now_ns: int) -> None:
        """Unknown, expired and already ended decisions are fine; then only blame is taken."""
        made = self._open.get(decision_id)
        if outcome.failed_instance is not None:
            self._blame(made, outcome.failed_instance, now_ns)
            if outcome.kind is OutcomeKind.PREFILL_FAILED:
                if made is not None:
                    made.failed |= {outcome.failed_instance}
                return
        if outcome.kind is OutcomeKind.FIRST_TOKEN:
            self._first_token(decision_id, made, now_ns)
            return
        if outcome.kind is OutcomeKind.FINISHED and made is not None:
            self._finished(made, outcome, now_ns)
        self._end(decision_id, now_ns)

    def expire(self, now_ns: int) -> None:
        for reservation in self._state.ledger.expire(now_ns):
            self._end(reservation.decision_id, now_ns)

    # --- inside ----------------------------------------------------------------------------------

    def _first_token(self, decision_id: DecisionId, made: OpenDecision | None, now_ns: int) -> None:
        if made is None or self._state.ledger.first_token(decision_id, now_ns) is None:
            return
        measured_ms = (now_ns - made.at_ns) / NS_PER_MS
        slo = made.query.slo
        if slo.ttft_ms is not None and made.counts_for_prices:
            is_late = made.elapsed_ms + measured_ms > slo.ttft_ms
            self._knowledge.prices.count(Stage.PREFILL, slo.quantile, is_late, now_ns)
        if made.failed:
            return  # it is the time of several attempts, and nobody's own
        view, change = self._view(made.prefill), 1.0
        if view is not None:
            # As the model would say it now: its own correction must not be made twice.
            model_ms = view.latency.prefill_ms(made.uncached_tokens, made.cached_tokens)
            change = model_ms / max(made.prefill_model_ms, 1e-6)
            predicted_ms = made.ttft_ms * change
            view.measured_ns = now_ns
            self._predictor.observe_ttft(view, predicted_ms, made.prefill_factor, measured_ms)
            self._state.dirty.add(view.instance_id)
        self._knowledge.residuals.observe(made.ttft_promise, measured_ms, now_ns, change)
        if now_ns >= self._publishes_ns:
            self._publishes_ns = now_ns + PUBLISH_MS * NS_PER_MS
            self._knowledge.publish()

    def _finished(self, made: OpenDecision, outcome: Outcome, now_ns: int) -> None:
        """Credits both legs. Not before the end: only then is it known who computed the prompt."""
        for ref in {made.prefill, made.decode}:
            view = self._view(ref)
            if view is not None and ref.instance_id not in made.failed:
                view.breaker.succeeded(now_ns)
        query, slo = made.query, made.query.slo
        if outcome.num_output_tokens:
            self._knowledge.lengths.observe(
                query.model, slo.class_name, query.num_prompt_tokens, outcome.num_output_tokens
            )
        if outcome.tpot_ms is None:
            return
        if slo.tpot_ms is not None and made.counts_for_prices:
            is_late = outcome.tpot_ms > slo.tpot_ms
            self._knowledge.prices.count(Stage.DECODE, slo.quantile, is_late, now_ns)
        bucket, residuals = bucket_of(query.num_prompt_tokens), self._knowledge.residuals
        decode, change = self._view(made.decode), 1.0
        if decode is not None:
            # As above: reports have told of the steps of an answer long before it ends.
            step_ms = _step_model_ms(decode, query, made.num_seqs)
            change = step_ms / max(made.step_model_ms, 1e-6)
        said_ms = residuals.observe(made.tpot_promise, outcome.tpot_ms, now_ns, change)
        measured_ms = outcome.tpot_ms
        if said_ms < measured_ms <= _own_pace_ms(made, decode, now_ns):
            measured_ms = said_ms
        residuals.note(Kind.STEP, bucket, measured_ms, said_ms, now_ns)
        if decode is not None:
            predicted_ms = made.tpot_ms * change
            decode.measured_ns = now_ns
            self._predictor.observe_tpot(decode, predicted_ms, made.decode_factor, measured_ms)

    def _blame(self, made: OpenDecision | None, failed: InstanceId, now_ns: int) -> None:
        """Only the epoch that failed: whoever restarted meanwhile is not to blame."""
        legs = (made.prefill, made.decode, made.decision.alternate) if made is not None else ()
        ref = next((leg for leg in legs if leg is not None and leg.instance_id == failed), None)
        view = self._state.cluster.get(failed) if ref is None else self._view(ref)
        if view is not None:
            view.breaker.failed(now_ns)
            self._state.dirty.add(failed)

    def _end(self, decision_id: DecisionId, now_ns: int) -> None:
        self._state.ledger.end(decision_id, now_ns)
        made = self._open.pop(decision_id, None)
        for ref in (made.prefill, made.decode) if made is not None else ():
            view = self._view(ref)
            if view is not None:
                view.breaker.released(decision_id)
        metrics.RESERVATIONS.set(len(self._state.ledger))

    def _view(self, ref: InstanceRef) -> InstanceView | None:
        return self._state.cluster.at_epoch(ref.instance_id, ref.epoch)


def _own_pace_ms(made: OpenDecision, decode: InstanceView | None, now_ns: int) -> float:
    """How long its tokens may have taken because the instance chose to: it holds decodes up for
    prompts, as far as their target allows. That says nothing of how wrong a prediction was."""
    target_ms = made.query.slo.tpot_ms
    if target_ms is None or decode is None or not decode.is_held_up(now_ns):
        return 0.0
    return PACE * target_ms


def _step_model_ms(view: InstanceView, query: RouteQuery, num_seqs: int) -> float:
    return view.latency.decode_step_ms(num_seqs, num_seqs * query.num_prompt_tokens)
