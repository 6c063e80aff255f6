"""What is known of a request's times and promise: for its answer, its metrics and its log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isthmus.common.attainment import Measured, Verdict, judge
from isthmus.common.clock import NS_PER_MS
from isthmus.common.timeline import Event, Timeline

if TYPE_CHECKING:
    from isthmus.gateway.exchange import Exchange

MS_PER_S = 1000


def whole_timeline(exchange: Exchange) -> Timeline:
    """The gateway's own events and those that the first choice brought from the instances."""
    timeline = Timeline()
    timeline.merge(exchange.timeline)
    timeline.merge(exchange.choices[0].timeline)
    return timeline


def measure(exchange: Exchange, now_ns: int) -> Measured:
    """As of now; TPOT of the slowest choice, since that is what somebody waited for."""
    timeline, arrived_ns = exchange.timeline, exchange.plan.arrival_ns
    end_ns = timeline.at_ns(Event.FINISHED) or now_ns
    first_ns = timeline.at_ns(Event.FIRST_FLUSH)
    if first_ns is None and (exchange.is_done or exchange.has_token):
        first_ns = end_ns  # it is being written in this moment, or all there was came with the end
    tpots = [choice.tpot_s for choice in exchange.choices if choice.tpot_s is not None]
    return Measured(
        ttft_ms=None if first_ns is None else max(0, first_ns - arrived_ns) / NS_PER_MS,
        tpot_ms=MS_PER_S * max(tpots) if tpots else None,
        e2e_ms=max(0, end_ns - arrived_ns) / NS_PER_MS,
    )


def num_cached_tokens(exchange: Exchange) -> int:
    """Of every prompt once, as the first of its choices saw it."""
    firsts = exchange.choices[:: exchange.plan.num_choices]
    return sum(choice.num_cached_tokens for choice in firsts)


def promised_ttft_ms(exchange: Exchange) -> float | None:
    """Predicted with the decision, and like the measured one from the arrival: with what had passed
    until then."""
    first = exchange.choices[0]
    if first.decision is None:
        return None
    routed_ns = first.timeline.at_ns(Event.ROUTED) or exchange.plan.arrival_ns
    elapsed_ms = max(0, routed_ns - exchange.plan.arrival_ns) / NS_PER_MS
    return elapsed_ms + first.decision.predicted_ttft_ms


def service_report(exchange: Exchange, now_ns: int) -> dict[str, Any]:
    """The extension of ``usage``: what was promised, what was measured, whether it was kept.

    ``queue_ms``: from the request's being ready to be sent to the begin of its computation.
    ``kv_exposed_ms``: what of moving its KV no compute hid; None where nothing was moved.
    """
    slo, measured = exchange.plan.slo, measure(exchange, now_ns)
    first, timeline = exchange.choices[0], whole_timeline(exchange)
    return {
        "slo_class": slo.class_name,
        "target_ttft_ms": slo.ttft_ms,
        "target_tpot_ms": slo.tpot_ms,
        "target_e2e_ms": slo.e2e_ms,
        "predicted_ttft_ms": _rounded(promised_ttft_ms(exchange)),
        "predicted_tpot_ms": _rounded(first.decision.predicted_tpot_ms if first.decision else None),
        "ttft_ms": _rounded(measured.ttft_ms),
        "tpot_ms": _rounded(measured.tpot_ms),
        "e2e_ms": _rounded(measured.e2e_ms),
        "queue_ms": _between(timeline, Event.TOKENISED, Event.SCHEDULED),
        "kv_exposed_ms": _between(timeline, Event.PREFILLED, Event.KV_READY),
        "second_token_gap_ms": _between(timeline, Event.FIRST_TOKEN, Event.SECOND_TOKEN),
        "cached_tokens": num_cached_tokens(exchange),
        "admission": first.decision.action.value if first.decision is not None else None,
        "good": judge(slo, measured) is Verdict.GOOD,
    }


def _between(timeline: Timeline, start: Event, end: Event) -> float | None:
    seconds = timeline.seconds(start, end)
    return None if seconds is None else round(MS_PER_S * seconds, 3)


def _rounded(value_ms: float | None) -> float | None:
    return None if value_ms is None else round(value_ms, 3)
