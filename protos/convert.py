"""Domain types ⇄ messages. The only module that knows both.

Deadlines become time left on the way out and instants on the way in, so that two clocks that
disagree cannot shorten or lengthen them.
"""

from __future__ import annotations

import time

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import (
    InstanceInfo,
    InstanceState,
    LatencyModel,
    LinkRate,
    LoadReport,
    Role,
    StepTotals,
)
from isthmus.common.errors import ErrorDetail, InvalidRequestError, IsthmusError
from isthmus.common.ids import BlockHash, BlockId, DecisionId, InstanceId, RequestId, TransferId
from isthmus.common.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvEventBatch,
)
from isthmus.common.kv_layout import KvLayout
from isthmus.common.timeline import Event, Timeline
from isthmus.common.transfer import (
    Checksum,
    ConnectorOffer,
    RankEndpoint,
    TransferOffer,
    TransferTicket,
)
from isthmus.common.types import (
    FinishReason,
    InstanceRef,
    LocalPrefillReason,
    Remedy,
    Request,
    RouteAction,
    RouteDecision,
    SamplingParams,
    Slo,
    TokenLogprob,
    Usage,
)
from isthmus.protos.v1 import common_pb2 as pb
from isthmus.protos.v1 import router_pb2, transfer_pb2

HASH_BYTES = 16

_FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PB = {value: key for key, value in _FINISH_TO_PB.items()}
_ROLE_TO_PB = {
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
    Role.MIXED: pb.ROLE_MIXED,
}
_ROLE_FROM_PB = {value: key for key, value in _ROLE_TO_PB.items()}
_STATE_TO_PB = {
    InstanceState.STARTING: pb.INSTANCE_STATE_STARTING,
    InstanceState.READY: pb.INSTANCE_STATE_READY,
    InstanceState.DRAINING: pb.INSTANCE_STATE_DRAINING,
    InstanceState.SWITCHING: pb.INSTANCE_STATE_SWITCHING,
    InstanceState.STOPPED: pb.INSTANCE_STATE_STOPPED,
    InstanceState.LOST: pb.INSTANCE_STATE_LOST,
}
_STATE_FROM_PB = {value: key for key, value in _STATE_TO_PB.items()}
_ACTION_TO_PB = {
    RouteAction.ADMIT: router_pb2.ROUTE_ACTION_ADMIT,
    RouteAction.QUEUE: router_pb2.ROUTE_ACTION_QUEUE,
    RouteAction.DEGRADE: router_pb2.ROUTE_ACTION_DEGRADE,
}
_ACTION_FROM_PB = {value: key for key, value in _ACTION_TO_PB.items()}
_EVENTS = {event.value: event for event in Event}
_REMEDIES = {remedy.value: remedy for remedy in Remedy}


def ms_left(deadline_ns: int) -> int:
    """Time from now to a unix instant, milliseconds, at least 0."""
    return max(0, (deadline_ns - time.time_ns()) // NS_PER_MS)


def instant_after(ms: int) -> int:
    return time.time_ns() + ms * NS_PER_MS


def error_to_pb(error: IsthmusError) -> pb.ErrorDetail:
    detail = ErrorDetail.of(error)
    return pb.ErrorDetail(
        code=detail.code,
        message=detail.message,
        stage=detail.stage,
        retryable=detail.retryable,
        instance_id=detail.instance_id,
        retry_after_ms=detail.retry_after_ms,
        param=detail.param,
        reason=detail.reason,
        predicted_ms=detail.predicted_ms,
        limit_ms=detail.limit_ms,
    )


def error_from_pb(message: pb.ErrorDetail) -> IsthmusError:
    return ErrorDetail(
        code=message.code,
        message=message.message,
        stage=message.stage,
        retryable=message.retryable,
        instance_id=message.instance_id,
        retry_after_ms=message.retry_after_ms,
        param=message.param if message.HasField("param") else None,
        reason=message.reason,
        predicted_ms=message.predicted_ms if message.HasField("predicted_ms") else None,
        limit_ms=message.limit_ms if message.HasField("limit_ms") else None,
    ).to_error()


_DEFAULT_SLO = Slo()


def slo_to_pb(slo: Slo) -> pb.Slo:
    return pb.Slo(
        class_name=slo.class_name,
        ttft_ms=slo.ttft_ms,
        tpot_ms=slo.tpot_ms,
        e2e_ms=slo.e2e_ms,
        quantile=slo.quantile,
        weight=slo.weight,
        is_strict=slo.is_strict,
        on_failure=slo.on_failure.value if slo.on_failure is not None else "",
    )


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


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=[pb.LogitBias(token_id=t, bias=b) for t, b in params.logit_bias],
        seed=params.seed,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


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
    return pb.Request(
        request_id=request.request_id,
        model=request.model,
        token_ids=request.token_ids,
        sampling=sampling_to_pb(request.sampling),
        arrival_unix_ns=request.arrival_ns,
        timeout_ms=ms_left(request.deadline_ns),
        slo=slo_to_pb(request.slo),
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        num_resumed_tokens=request.num_resumed_tokens,
    )


def request_from_pb(message: pb.Request) -> Request:
    """Raises InvalidRequestError for a request without id or tokens."""
    if not message.request_id or not message.token_ids:
        raise InvalidRequestError("a request needs an id and at least one token", stage="decode")
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
    return _FINISH_FROM_PB.get(value)


def role_to_pb(role: Role) -> pb.Role:
    return _ROLE_TO_PB[role]


def role_from_pb(value: pb.Role) -> Role:
    return _ROLE_FROM_PB[value]


def state_to_pb(state: InstanceState) -> pb.InstanceState:
    return _STATE_TO_PB[state]


def state_from_pb(value: pb.InstanceState) -> InstanceState:
    return _STATE_FROM_PB[value]


def ref_to_pb(ref: InstanceRef) -> pb.InstanceRef:
    return pb.InstanceRef(instance_id=ref.instance_id, epoch=ref.epoch, address=ref.address)


def ref_from_pb(message: pb.InstanceRef) -> InstanceRef:
    return InstanceRef(InstanceId(message.instance_id), message.epoch, message.address)


def layout_to_pb(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
        kind=layout.kind,
        order=layout.order,
        tp_rank=layout.tp_rank,
        tp_size=layout.tp_size,
        total_kv_heads=layout.total_kv_heads,
        windows=layout.windows,
    )


def layout_from_pb(message: pb.KvLayout) -> KvLayout:
    return KvLayout(
        model_fingerprint=message.model_fingerprint,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
        kind=message.kind,
        order=message.order,
        tp_rank=message.tp_rank,
        tp_size=message.tp_size,
        total_kv_heads=message.total_kv_heads,
        windows=tuple(message.windows),
    )


def latency_to_pb(model: LatencyModel) -> pb.LatencyModel:
    return pb.LatencyModel(
        prefill_base=model.prefill_base,
        prefill_token=model.prefill_token,
        prefill_pair=model.prefill_pair,
        decode_base=model.decode_base,
        decode_seq=model.decode_seq,
        decode_context=model.decode_context,
        large_batch=model.large_batch,
        large_base=model.large_base,
        large_seq=model.large_seq,
        large_context=model.large_context,
    )


def latency_from_pb(message: pb.LatencyModel) -> LatencyModel:
    return LatencyModel(
        prefill_base=message.prefill_base,
        prefill_token=message.prefill_token,
        prefill_pair=message.prefill_pair,
        decode_base=message.decode_base,
        decode_seq=message.decode_seq,
        decode_context=message.decode_context,
        large_batch=message.large_batch,
        large_base=message.large_base,
        large_seq=message.large_seq,
        large_context=message.large_context,
    )


def info_to_pb(info: InstanceInfo) -> pb.InstanceInfo:
    return pb.InstanceInfo(
        instance_id=info.instance_id,
        role=role_to_pb(info.role),
        state=state_to_pb(info.state),
        epoch=info.epoch,
        address=info.address,
        metrics_address=info.metrics_address,
        model=info.model,
        model_path=info.model_path,
        kv_layout=layout_to_pb(info.kv_layout),
        num_blocks=info.num_blocks,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_num_seqs=info.max_num_seqs,
        max_model_len=info.max_model_len,
        connector=info.connector,
        latency=latency_to_pb(info.latency),
        node=info.node,
        pid=info.pid,
        version=info.version,
        rank_pids=info.rank_pids,
        zone=info.zone,
    )


def info_from_pb(message: pb.InstanceInfo) -> InstanceInfo:
    return InstanceInfo(
        instance_id=InstanceId(message.instance_id),
        role=role_from_pb(message.role),
        state=state_from_pb(message.state),
        epoch=message.epoch,
        address=message.address,
        metrics_address=message.metrics_address,
        model=message.model,
        model_path=message.model_path,
        kv_layout=layout_from_pb(message.kv_layout),
        num_blocks=message.num_blocks,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_num_seqs=message.max_num_seqs,
        max_model_len=message.max_model_len,
        connector=message.connector,
        latency=latency_from_pb(message.latency),
        node=message.node,
        pid=message.pid,
        version=message.version,
        rank_pids=tuple(message.rank_pids),
        zone=message.zone,
    )


def load_to_pb(report: LoadReport) -> pb.LoadReport:
    return pb.LoadReport(
        instance_id=report.instance_id,
        epoch=report.epoch,
        seq=report.seq,
        at_unix_ns=report.at_ns,
        waiting_seqs=report.waiting_seqs,
        waiting_tokens=report.waiting_tokens,
        oldest_wait_ms=report.oldest_wait_ms,
        running_seqs=report.running_seqs,
        running_context_tokens=report.running_context_tokens,
        num_blocks=report.num_blocks,
        free_blocks=report.free_blocks,
        held_blocks=report.held_blocks,
        cached_blocks=report.cached_blocks,
        inflight_transfer_bytes=report.inflight_transfer_bytes,
        step_ms=report.step_ms,
        steps=report.steps,
        totals=_totals_to_pb(report.totals),
        links=[
            pb.LinkRate(target_id=link.target_id, bytes_per_s=link.bytes_per_s)
            for link in report.links
        ],
    )


def load_from_pb(message: pb.LoadReport) -> LoadReport:
    return LoadReport(
        instance_id=InstanceId(message.instance_id),
        epoch=message.epoch,
        seq=message.seq,
        at_ns=message.at_unix_ns,
        waiting_seqs=message.waiting_seqs,
        waiting_tokens=message.waiting_tokens,
        oldest_wait_ms=message.oldest_wait_ms,
        running_seqs=message.running_seqs,
        running_context_tokens=message.running_context_tokens,
        num_blocks=message.num_blocks,
        free_blocks=message.free_blocks,
        held_blocks=message.held_blocks,
        cached_blocks=message.cached_blocks,
        inflight_transfer_bytes=message.inflight_transfer_bytes,
        step_ms=message.step_ms,
        steps=message.steps,
        totals=_totals_from_pb(message.totals),
        links=tuple(
            LinkRate(InstanceId(link.target_id), link.bytes_per_s) for link in message.links
        ),
    )


def _totals_to_pb(totals: StepTotals) -> pb.StepTotals:
    return pb.StepTotals(
        prefill_steps=totals.prefill_steps,
        prefill_tokens=totals.prefill_tokens,
        prefill_pairs=totals.prefill_pairs,
        beside_seqs=totals.beside_seqs,
        beside_context=totals.beside_context,
        prefill_ms=totals.prefill_ms,
        decode_steps=totals.decode_steps,
        decode_seqs=totals.decode_seqs,
        decode_context=totals.decode_context,
        decode_ms=totals.decode_ms,
    )


def _totals_from_pb(message: pb.StepTotals) -> StepTotals:
    return StepTotals(
        prefill_steps=message.prefill_steps,
        prefill_tokens=message.prefill_tokens,
        prefill_pairs=message.prefill_pairs,
        beside_seqs=message.beside_seqs,
        beside_context=message.beside_context,
        prefill_ms=message.prefill_ms,
        decode_steps=message.decode_steps,
        decode_seqs=message.decode_seqs,
        decode_context=message.decode_context,
        decode_ms=message.decode_ms,
    )


def split_hashes(data: bytes) -> tuple[BlockHash, ...]:
    return tuple(
        BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES)
    )


def kv_batch_to_pb(batch: KvEventBatch) -> pb.KvEventBatch:
    return pb.KvEventBatch(
        instance_id=batch.instance_id,
        epoch=batch.epoch,
        first_seq=batch.first_seq,
        events=[_kv_event_to_pb(event) for event in batch.events],
        is_snapshot=batch.is_snapshot,
    )


def _kv_event_to_pb(event: KvEvent) -> pb.KvEvent:
    match event:
        case BlocksStored(hashes):
            return pb.KvEvent(kind=pb.KvEvent.KIND_STORED, hashes=b"".join(hashes))
        case BlocksRemoved(hashes):
            return pb.KvEvent(kind=pb.KvEvent.KIND_REMOVED, hashes=b"".join(hashes))
        case CacheCleared():
            return pb.KvEvent(kind=pb.KvEvent.KIND_CLEARED)


def kv_batch_from_pb(message: pb.KvEventBatch) -> KvEventBatch:
    return KvEventBatch(
        instance_id=InstanceId(message.instance_id),
        epoch=message.epoch,
        first_seq=message.first_seq,
        events=tuple(_kv_event_from_pb(event) for event in message.events),
        is_snapshot=message.is_snapshot,
    )


def _kv_event_from_pb(message: pb.KvEvent) -> KvEvent:
    if message.kind == pb.KvEvent.KIND_STORED:
        return BlocksStored(split_hashes(message.hashes))
    if message.kind == pb.KvEvent.KIND_REMOVED:
        return BlocksRemoved(split_hashes(message.hashes))
    return CacheCleared()


def ticket_to_pb(ticket: TransferTicket) -> pb.TransferTicket:
    return pb.TransferTicket(
        transfer_id=ticket.transfer_id,
        request_id=ticket.request_id,
        source=ref_to_pb(ticket.source),
        target=ref_to_pb(ticket.target),
        first_block=ticket.first_block,
        target_block_ids=ticket.target_block_ids,
        num_tokens=ticket.num_tokens,
        layout_hash=ticket.layout_hash,
        timeout_ms=ms_left(ticket.deadline_ns),
        protocol_version=ticket.protocol_version,
        checksum=ticket.checksum.value,
    )


def ticket_from_pb(message: pb.TransferTicket) -> TransferTicket:
    return TransferTicket(
        transfer_id=TransferId(message.transfer_id),
        request_id=RequestId(message.request_id),
        source=ref_from_pb(message.source),
        target=ref_from_pb(message.target),
        first_block=message.first_block,
        target_block_ids=tuple(BlockId(block) for block in message.target_block_ids),
        num_tokens=message.num_tokens,
        layout_hash=message.layout_hash,
        deadline_ns=instant_after(message.timeout_ms),
        protocol_version=message.protocol_version,
        checksum=_checksum_from_pb(message.checksum),
    )


def _checksum_from_pb(value: str) -> Checksum:
    """NONE for one that is not known here: whoever counts on it will miss it."""
    return next((each for each in Checksum if each.value == value), Checksum.NONE)


def decision_to_pb(decision: RouteDecision) -> router_pb2.RouteDecision:
    return router_pb2.RouteDecision(
        decision_id=decision.decision_id,
        request_id=decision.request_id,
        action=_ACTION_TO_PB[decision.action],
        decode=ref_to_pb(decision.decode) if decision.decode else None,
        prefill=ref_to_pb(decision.prefill) if decision.prefill else None,
        alternate=ref_to_pb(decision.alternate) if decision.alternate else None,
        local_reason=decision.local_reason.value,
        cached_tokens=decision.cached_tokens,
        predicted_ttft_ms=decision.predicted_ttft_ms,
        predicted_tpot_ms=decision.predicted_tpot_ms,
        policy=decision.policy,
        reason=decision.reason,
        ttl_ms=ms_left(decision.expires_ns),
    )


def decision_from_pb(message: router_pb2.RouteDecision) -> RouteDecision:
    return RouteDecision(
        decision_id=DecisionId(message.decision_id),
        request_id=RequestId(message.request_id),
        action=_ACTION_FROM_PB[message.action],
        decode=ref_from_pb(message.decode) if message.HasField("decode") else None,
        prefill=ref_from_pb(message.prefill) if message.HasField("prefill") else None,
        alternate=ref_from_pb(message.alternate) if message.HasField("alternate") else None,
        local_reason=LocalPrefillReason(message.local_reason or "none"),
        cached_tokens=message.cached_tokens,
        predicted_ttft_ms=message.predicted_ttft_ms,
        predicted_tpot_ms=message.predicted_tpot_ms,
        policy=message.policy,
        reason=message.reason,
        expires_ns=instant_after(message.ttl_ms),
    )


def offer_to_pb(offer: TransferOffer) -> transfer_pb2.TransferOffer:
    return transfer_pb2.TransferOffer(
        protocol_version=offer.protocol_version,
        layout_hash=offer.layout_hash,
        instance=ref_to_pb(offer.instance),
        ranks=[
            transfer_pb2.RankEndpoint(
                tp_rank=rank.tp_rank,
                connectors=[
                    transfer_pb2.ConnectorOffer(
                        name=connector.name,
                        metadata=connector.metadata,
                        domain=connector.domain,
                        is_direct=connector.is_direct,
                    )
                    for connector in rank.connectors
                ],
                base_address=rank.base_address,
                num_bytes=rank.num_bytes,
                num_blocks=rank.num_blocks,
                layout=layout_to_pb(rank.layout),
            )
            for rank in offer.ranks
        ],
        checksum=offer.checksum.value,
    )


def offer_from_pb(message: transfer_pb2.TransferOffer) -> TransferOffer:
    return TransferOffer(
        protocol_version=message.protocol_version,
        layout_hash=message.layout_hash,
        instance=ref_from_pb(message.instance),
        ranks=tuple(
            RankEndpoint(
                tp_rank=rank.tp_rank,
                connectors=tuple(
                    ConnectorOffer(
                        connector.name, connector.metadata, connector.domain, connector.is_direct
                    )
                    for connector in rank.connectors
                ),
                base_address=rank.base_address,
                num_bytes=rank.num_bytes,
                num_blocks=rank.num_blocks,
                layout=layout_from_pb(rank.layout),
            )
            for rank in message.ranks
        ),
        checksum=_checksum_from_pb(message.checksum),
    )
