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
        timeline = _whole_timeline(exchange)
        outcome = _outcome(exchange)
        metrics.REQUESTS_INFLIGHT.dec()
        metrics.REQUESTS.labels(slo_class=SLO_CLASS, outcome=outcome).inc()
        num_output = sum(choice.num_output_tokens for choice in exchange.choices)
        metrics.OUTPUT_TOKENS.inc(num_output)
        for choice in exchange.choices:
            has_prompt = choice.num_output_tokens > 0
            if has_prompt and choice.local_reason is not LocalPrefillReason.NONE:
                metrics.LOCAL_PREFILL.labels(reason=choice.local_reason.value).inc()
        for stage, (begin, end) in STAGES.items():
            seconds = timeline.seconds(begin, end)
            if seconds is not None:
                metrics.STAGE.labels(stage=stage).observe(seconds)
        ttft_s = timeline.seconds(Event.ARRIVED, Event.FIRST_FLUSH)
        e2e_s = timeline.seconds(Event.ARRIVED, Event.FINISHED)
        if ttft_s is not None:
            metrics.TTFT.labels(slo_class=SLO_CLASS).observe(ttft_s)
        if outcome == "ok":
            self._count_finished(e2e_s)
        self._log(outcome, timeline, num_output)

    def _count_finished(self, e2e_s: float | None) -> None:
        exchange = self._exchange
        metrics.PROMPT_TOKENS.inc(sum(len(p.token_ids) for p in exchange.plan.prompts))
        metrics.CACHED_TOKENS.inc(num_cached_tokens(exchange))
        if e2e_s is not None:
            metrics.E2E.labels(slo_class=SLO_CLASS).observe(e2e_s)
        longest = max(exchange.choices, key=lambda choice: choice.num_output_tokens)
        if longest.tpot_s is not None:
            metrics.TPOT.labels(slo_class=SLO_CLASS).observe(longest.tpot_s)

    def _log(self, outcome: str, timeline: Timeline, num_output: int) -> None:
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
        spans = {f"{stage}_ms": bounds for stage, bounds in STAGES.items()}
        spans["ttft_ms"] = (Event.ARRIVED, Event.FIRST_FLUSH)
        spans["e2e_ms"] = (Event.ARRIVED, Event.FINISHED)
        for name, (begin, end) in spans.items():
            seconds = timeline.seconds(begin, end)
            if seconds is not None:
                fields[name] = round(1000 * seconds, 3)
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


def _whole_timeline(exchange: Exchange) -> Timeline:
    """The gateway's own events and those that the first choice brought from the instances."""
    timeline = Timeline(dict(exchange.timeline.items()))
    timeline.merge(exchange.choices[0].timeline)
    return timeline
