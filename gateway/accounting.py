"""What is counted and logged at the end of a request: one place, one line, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.common import metrics
from isthmus.common.errors import CancelledError, IsthmusError
from isthmus.common.logging import get_logger
from isthmus.common.timeline import STAGES, Event, Timeline
from isthmus.common.types import LocalPrefillReason

if TYPE_CHECKING:
    from isthmus.gateway.exchange import Exchange

SLO_CLASS = "default"
_SPANS = {
    **STAGES,
    "ttft": (Event.ARRIVED, Event.FIRST_FLUSH),
    "e2e": (Event.ARRIVED, Event.FINISHED),
}
# Looked up once: a label costs as much as an observation.
_STAGES = {stage: metrics.STAGE.labels(stage=stage) for stage in STAGES}
_TTFT = metrics.TTFT.labels(slo_class=SLO_CLASS)
_E2E = metrics.E2E.labels(slo_class=SLO_CLASS)
_TPOT = metrics.TPOT.labels(slo_class=SLO_CLASS)
_log = get_logger("request")


def count_refused(request_id: str, error: IsthmusError) -> None:
    """A request that ended before it was an exchange: refused, or its client left early."""
    outcome = _outcome_of(error)
    metrics.REQUESTS.labels(slo_class=SLO_CLASS, outcome=outcome).inc()
    _log.info(
        "request ended",
        request_id=request_id,
        outcome=outcome,
        stage=error.stage,
        param=error.param,
        error=error.message,
    )


class Accounting:
    """Counts the request as in flight from construction to ``count``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        metrics.REQUESTS_INFLIGHT.inc()

    def count(self) -> None:
        exchange = self._exchange
        outcome = _outcome(exchange)
        seconds = _spans(exchange)
        metrics.REQUESTS_INFLIGHT.dec()
        metrics.REQUESTS.labels(slo_class=SLO_CLASS, outcome=outcome).inc()
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
            _TTFT.observe(seconds["ttft"])
        if outcome == "ok":
            self._count_finished(seconds.get("e2e"))
        self._log(outcome, seconds, num_output)

    def _count_finished(self, e2e_s: float | None) -> None:
        exchange = self._exchange
        metrics.PROMPT_TOKENS.inc(sum(len(p.token_ids) for p in exchange.plan.prompts))
        metrics.CACHED_TOKENS.inc(num_cached_tokens(exchange))
        if e2e_s is not None:
            _E2E.observe(e2e_s)
        longest = max(exchange.choices, key=lambda choice: choice.num_output_tokens)
        if longest.tpot_s is not None:
            _TPOT.observe(longest.tpot_s)

    def _log(self, outcome: str, seconds: dict[str, float], num_output: int) -> None:
        exchange = self._exchange
        decision = exchange.choices[0].decision
        fields: dict[str, object] = {
            "request_id": exchange.plan.request_id,
            "outcome": outcome,
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
            fields[f"{name}_ms"] = round(1000 * value, 3)
        if exchange.error is not None:
            fields["stage"] = exchange.error.stage
            fields["error"] = exchange.error.message
        _log.info("request ended", **fields)


def num_cached_tokens(exchange: Exchange) -> int:
    """Of every prompt once, as the first of its choices saw it."""
    firsts = exchange.choices[:: exchange.plan.num_choices]
    return sum(choice.num_cached_tokens for choice in firsts)


def _outcome(exchange: Exchange) -> str:
    return "ok" if exchange.error is None else _outcome_of(exchange.error)


def _outcome_of(error: IsthmusError) -> str:
    return "cancelled" if isinstance(error, CancelledError) else error.code


def _spans(exchange: Exchange) -> dict[str, float]:
    """Seconds of every part of the request's life that is known: from the gateway's own events and
    those that the first choice brought from the instances."""
    timeline = Timeline()
    timeline.merge(exchange.timeline)
    timeline.merge(exchange.choices[0].timeline)
    spans = {name: timeline.seconds(begin, end) for name, (begin, end) in _SPANS.items()}
    return {name: seconds for name, seconds in spans.items() if seconds is not None}
