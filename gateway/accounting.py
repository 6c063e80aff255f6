"""What is counted and logged at the end of a request: one place, one line, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.common import metrics
from isthmus.common.attainment import Measured, Verdict, has_missed, is_offered, judge, judge_error
from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.errors import InfeasibleSloError, IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.timeline import STAGES, Event, spans_of
from isthmus.common.types import LocalPrefillReason, RouteAction, RouteDecision
from isthmus.gateway.class_metrics import (
    admission_counter,
    metrics_of,
    offered_counter,
    outcome_counter,
)
from isthmus.gateway.goodput import GoodputWindow
from isthmus.gateway.measured import measure, num_cached_tokens, whole_timeline

if TYPE_CHECKING:
    from isthmus.gateway.exchange import Exchange

MS_PER_S = 1000
# Looked up once: a label costs as much as an observation.
_STAGES = {stage: metrics.STAGE.labels(stage=stage) for stage in STAGES}
_REASONS = {
    RouteAction.ADMIT: "at_once",
    RouteAction.QUEUE: "after_wait",
    RouteAction.DEGRADE: "late",
}
_log = get_logger("request")


def decision_reason(decision: RouteDecision) -> str:
    """Why it was decided so, as one word: the router's reason begins with what the size of a
    request makes impossible."""
    is_infeasible = decision.reason.startswith(InfeasibleSloError.code)
    return InfeasibleSloError.code if is_infeasible else _REASONS[decision.action]


@dataclass(slots=True)
class Offer:
    """Whose request it is and of which class: the labels of what is counted of it."""

    slo_class: str
    tenant: str
    is_counted: bool = False

    def count_offered(self) -> None:
        self.is_counted = True
        offered_counter(self.slo_class, self.tenant).inc()

    def count_decision(self, decision: str, reason: str) -> None:
        admission_counter(self.slo_class, self.tenant, decision, reason).inc()

    def count_end(self, verdict: Verdict, goodput: GoodputWindow, *, has_missed: bool) -> None:
        outcome_counter(self.slo_class, self.tenant, verdict.value).inc()
        if is_offered(verdict, has_missed=has_missed):
            goodput.add(self.slo_class, self.tenant, is_good=verdict is Verdict.GOOD)


def count_refused(
    request_id: str, error: IsthmusError, offer: Offer, goodput: GoodputWindow
) -> None:
    """A request that ended before it was an exchange: refused, or its client left early."""
    verdict = judge_error(error, has_begun=False)
    offer.count_end(verdict, goodput, has_missed=False)
    if is_offered(verdict, has_missed=False) and not offer.is_counted:
        offer.count_offered()  # ended before its body was read, and demand all the same
    if verdict is Verdict.REJECTED:
        offer.count_decision("reject", error.reason)
    _log.info(
        "request ended",
        request_id=request_id,
        outcome=verdict.value,
        code=error.code,
        slo_class=offer.slo_class,
        tenant=offer.tenant,
        stage=error.stage,
        param=error.param,
        error=error.message,
    )


class Accounting:
    """Counts the request as in flight from construction to ``count``."""

    def __init__(self, exchange: Exchange, clock: Clock, goodput: GoodputWindow) -> None:
        self._exchange = exchange
        self._clock = clock
        self._goodput = goodput
        self._offer = Offer(exchange.plan.slo.class_name, exchange.plan.tenant_label)
        metrics.REQUESTS_INFLIGHT.inc()

    def count(self) -> None:
        exchange, offer = self._exchange, self._offer
        measured = measure(exchange, self._clock.now_ns())
        seconds = spans_of(whole_timeline(exchange))
        verdict = self._verdict(measured)
        metrics.REQUESTS_INFLIGHT.dec()
        is_late = has_missed(exchange.plan.slo, measured, measured.e2e_ms or 0.0)
        offer.count_end(verdict, self._goodput, has_missed=is_late)
        self._count_decision(verdict)
        num_output = sum(choice.num_output_tokens for choice in exchange.choices)
        metrics.OUTPUT_TOKENS.inc(num_output)
        for choice in exchange.choices:
            has_prompt = choice.num_output_tokens > 0
            if has_prompt and choice.local_reason is not LocalPrefillReason.NONE:
                metrics.LOCAL_PREFILL.labels(reason=choice.local_reason.value).inc()
        for stage, histogram in _STAGES.items():
            if stage in seconds:
                histogram.observe(seconds[stage])
        if "ttft" in seconds:
            metrics_of(offer.slo_class).ttft.observe(seconds["ttft"])
        if exchange.error is None:
            self._count_finished(measured, seconds.get("e2e"))
        self._log(verdict, measured, seconds, num_output)

    def _verdict(self, measured: Measured) -> Verdict:
        error = self._exchange.error
        if error is None:
            return judge(self._exchange.plan.slo, measured)
        return judge_error(error, has_begun=self._exchange.has_token)

    def _count_decision(self, verdict: Verdict) -> None:
        exchange = self._exchange
        if exchange.error is not None and verdict is Verdict.REJECTED:
            self._offer.count_decision("reject", exchange.error.reason)
            return
        decision = exchange.choices[0].decision
        if decision is not None:
            self._offer.count_decision(decision.action.value, decision_reason(decision))
            of_class = metrics_of(self._offer.slo_class)
            of_class.predicted_ttft.observe(decision.predicted_ttft_ms / MS_PER_S)
            of_class.predicted_tpot.observe(decision.predicted_tpot_ms / MS_PER_S)
            self._count_slack(decision)

    def _count_slack(self, decision: RouteDecision) -> None:
        """As it was at the decision, of the targets there are."""
        exchange = self._exchange
        slo, of_class = exchange.plan.slo, metrics_of(self._offer.slo_class)
        routed_ns = exchange.choices[0].timeline.at_ns(Event.ROUTED)
        if slo.ttft_ms is not None and routed_ns is not None:
            elapsed_ms = (routed_ns - exchange.plan.arrival_ns) / NS_PER_MS
            slack_ms = slo.ttft_ms - elapsed_ms - decision.predicted_ttft_ms
            of_class.ttft_slack.observe(slack_ms / MS_PER_S)
        if slo.tpot_ms is not None:
            of_class.tpot_slack.observe((slo.tpot_ms - decision.predicted_tpot_ms) / MS_PER_S)

    def _count_finished(self, measured: Measured, e2e_s: float | None) -> None:
        exchange, of_class = self._exchange, metrics_of(self._offer.slo_class)
        metrics.PROMPT_TOKENS.inc(sum(len(p.token_ids) for p in exchange.plan.prompts))
        metrics.CACHED_TOKENS.inc(num_cached_tokens(exchange))
        if e2e_s is not None:
            of_class.e2e.observe(e2e_s)
        if measured.tpot_ms is not None:
            of_class.tpot.observe(measured.tpot_ms / MS_PER_S)

    def _log(
        self, verdict: Verdict, measured: Measured, seconds: dict[str, float], num_output: int
    ) -> None:
        exchange = self._exchange
        decision = exchange.choices[0].decision
        fields: dict[str, object] = {
            "request_id": exchange.plan.request_id,
            "outcome": verdict.value,
            "slo_class": self._offer.slo_class,
            "tenant": self._offer.tenant,
            "model": exchange.plan.model,
            "choices": len(exchange.choices),
            "prompt_tokens": sum(len(p.token_ids) for p in exchange.plan.prompts),
            "cached_tokens": num_cached_tokens(exchange),
            "output_tokens": num_output,
            "retries": sum(choice.num_retries for choice in exchange.choices),
            "transferred_bytes": sum(choice.transferred_bytes for choice in exchange.choices),
            "local_prefill": exchange.choices[0].local_reason.value,
            "prefill": decision.prefill.instance_id if decision and decision.prefill else "",
            "decode": decision.decode.instance_id if decision and decision.decode else "",
        }
        for name, value in seconds.items():
            fields[f"{name}_ms"] = round(MS_PER_S * value, 3)
        if measured.tpot_ms is not None:
            fields["tpot_ms"] = round(measured.tpot_ms, 3)
        if exchange.error is not None:
            fields["code"] = exchange.error.code
            fields["stage"] = exchange.error.stage
            fields["error"] = exchange.error.message
        _log.info("request ended", **fields)
