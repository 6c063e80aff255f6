"""An instance: who it is, what it can do, and what it reports of its load."""

from __future__ import annotations

from isthmus.common.cluster import (
    InstanceInfo,
    InstanceState,
    LatencyModel,
    LinkRate,
    LoadReport,
    Role,
    StepTotals,
)
from isthmus.common.errors import InternalError, LayoutMismatchError
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.types import InstanceRef
from isthmus.protos.v1 import common_pb2 as pb

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
    InstanceState.STOPPED: pb.INSTANCE_STATE_STOPPED,
    InstanceState.LOST: pb.INSTANCE_STATE_LOST,
}
_STATE_FROM_PB = {value: key for key, value in _STATE_TO_PB.items()}


def role_to_pb(role: Role) -> pb.Role:
    return _ROLE_TO_PB[role]


def role_from_pb(value: pb.Role) -> Role:
    """Raises InternalError for a role that is not known here: nobody could say what it does."""
    role = _ROLE_FROM_PB.get(value)
    if role is None:
        raise InternalError(f"role {int(value)} is not known here", stage="convert")
    return role


def state_to_pb(state: InstanceState) -> pb.InstanceState:
    return _STATE_TO_PB[state]


def state_from_pb(value: pb.InstanceState) -> InstanceState:
    """DRAINING for a state that is not known here: what runs there goes on, nothing new is sent."""
    return _STATE_FROM_PB.get(value, InstanceState.DRAINING)


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
        fetch_min_tokens=info.fetch_min_tokens,
        zone=info.zone,
    )


def info_from_pb(message: pb.InstanceInfo) -> InstanceInfo:
    """Raises InternalError for a role, and LayoutMismatchError for a kind of KV, that nothing here
    could be done with."""
    layout = layout_from_pb(message.kv_layout)
    if problem := layout.problem:
        raise LayoutMismatchError(
            f"KV layout of {message.instance_id}: {problem}",
            stage="convert",
            instance_id=message.instance_id,
        )
    return InstanceInfo(
        instance_id=InstanceId(message.instance_id),
        role=role_from_pb(message.role),
        state=state_from_pb(message.state),
        epoch=message.epoch,
        address=message.address,
        metrics_address=message.metrics_address,
        model=message.model,
        model_path=message.model_path,
        kv_layout=layout,
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
        fetch_min_tokens=message.fetch_min_tokens,
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
        prompt_seqs=report.prompt_seqs,
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
        prompt_seqs=message.prompt_seqs if message.HasField("prompt_seqs") else None,
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
