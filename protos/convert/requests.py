"""A request, what is asked of it, and what came of it.

A message given to another's constructor is copied, by way of its bytes. What goes into another is
made as ``Fields`` for that: the constructor fills those in where they belong.
"""

from __future__ import annotations

from typing import Any

from isthmus.common.errors import InvalidRequestError
from isthmus.common.ids import RequestId
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import (
    FinishReason,
    Remedy,
    Request,
    SamplingParams,
    Slo,
    TokenLogprob,
    Usage,
)
from isthmus.protos.convert.times import instant_after, instant_before, ms_left, ms_since
from isthmus.protos.v1 import common_pb2 as pb

_FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}
_EVENTS = {event.value: event for event in Event}
_REMEDIES = {remedy.value: remedy for remedy in Remedy}
_DEFAULT_SLO = Slo()
Fields = dict[str, Any]


def slo_to_pb(slo: Slo) -> pb.Slo:
    return pb.Slo(**slo_fields(slo))


def slo_fields(slo: Slo) -> Fields:
    return {
        "class_name": slo.class_name,
        "ttft_ms": slo.ttft_ms,
        "tpot_ms": slo.tpot_ms,
        "e2e_ms": slo.e2e_ms,
        "quantile": slo.quantile,
        "weight": slo.weight,
        "is_strict": slo.is_strict,
        "on_failure": slo.on_failure.value if slo.on_failure is not None else "",
    }


def slo_from_pb(message: pb.Slo) -> Slo:
    """A remedy that this version does not know leaves it to the decode instance."""
    return Slo(
        class_name=message.class_name or _DEFAULT_SLO.class_name,
        ttft_ms=message.ttft_ms if message.HasField("ttft_ms") else None,
        tpot_ms=message.tpot_ms if message.HasField("tpot_ms") else None,
        e2e_ms=message.e2e_ms if message.HasField("e2e_ms") else None,
        quantile=message.quantile or _DEFAULT_SLO.quantile,
        weight=message.weight or _DEFAULT_SLO.weight,
        is_strict=message.is_strict,
        on_failure=_REMEDIES.get(message.on_failure),
    )


def sampling_fields(params: SamplingParams) -> Fields:
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop_token_ids": params.stop_token_ids,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": [{"token_id": token, "bias": bias} for token, bias in params.logit_bias],
        "seed": params.seed,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def request_to_pb(request: Request) -> pb.Request:
    return pb.Request(**request_fields(request))


def request_fields(request: Request) -> Fields:
    first_ns = request.first_token_ns
    return {
        "request_id": request.request_id,
        "model": request.model,
        "token_ids": request.token_ids,
        "sampling": sampling_fields(request.sampling),
        "arrival_unix_ns": request.arrival_ns,
        "timeout_ms": ms_left(request.deadline_ns),
        "slo": slo_fields(request.slo),
        "tenant": request.tenant,
        "cache_salt": request.cache_salt,
        "num_resumed_tokens": request.num_resumed_tokens,
        "first_token_age_ms": ms_since(first_ns) if first_ns is not None else None,
    }


def request_from_pb(message: pb.Request) -> Request:
    """Raises InvalidRequestError for a request without id or tokens."""
    if not message.request_id or not message.token_ids:
        raise InvalidRequestError("a request needs an id and at least one token", stage="decode")
    has_first = message.HasField("first_token_age_ms")
    return Request(
        request_id=RequestId(message.request_id),
        model=message.model,
        token_ids=tuple(message.token_ids),
        sampling=sampling_from_pb(message.sampling),
        arrival_ns=message.arrival_unix_ns,
        deadline_ns=instant_after(message.timeout_ms),
        slo=slo_from_pb(message.slo),
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        num_resumed_tokens=message.num_resumed_tokens,
        first_token_ns=instant_before(message.first_token_age_ms) if has_first else None,
    )


def logprob_to_pb(logprob: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        top=[pb.AlternativeToken(token_id=t, logprob=p) for t, p in logprob.top],
    )


def logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=message.token_id,
        logprob=message.logprob,
        rank=message.rank,
        top=tuple((item.token_id, item.logprob) for item in message.top),
    )


def usage_to_pb(usage: Usage) -> pb.Usage:
    return pb.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_cached_tokens=usage.num_cached_tokens,
    )


def usage_from_pb(message: pb.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        num_cached_tokens=message.num_cached_tokens,
    )


def timeline_to_pb(timeline: Timeline) -> pb.Timeline:
    events = [pb.TimelineEvent(event=e.value, at_unix_ns=at) for e, at in timeline.items()]
    return pb.Timeline(events=events)


def timeline_from_pb(message: pb.Timeline) -> Timeline:
    """Events that this version does not know are left out."""
    found = ((_EVENTS.get(item.event), item.at_unix_ns) for item in message.events)
    return Timeline({event: at_ns for event, at_ns in found if event is not None})


def finish_reason_to_pb(reason: FinishReason | None) -> pb.FinishReason:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PB[reason]


def finish_reason_from_pb(value: pb.FinishReason) -> FinishReason | None:
    """None for a request that goes on. One that ended for a reason that is not known here has
    stopped, whatever made it stop."""
    if value == pb.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISH_FROM_PB.get(value, FinishReason.STOP)
