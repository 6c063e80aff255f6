"""The router's state for people and probes: plain data, safe to keep and to render."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common.cluster import InstanceState, Role
from isthmus.common.ids import InstanceId
from isthmus.router.cluster_view import InstanceView
from isthmus.router.state import RouterState


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    instance_id: InstanceId
    role: Role
    state: InstanceState
    epoch: int
    address: str
    model: str
    is_usable: bool
    problem: str  # why not, or with whom it is incompatible; empty when all is well
    is_registered: bool
    breaker: str
    load_age_ms: float | None  # None = never reported
    waiting_seqs: int
    waiting_tokens: int
    running_seqs: int
    free_blocks: int
    num_blocks: int
    cached_blocks: int  # in the router's index
    num_reservations: int
    prefill_factor: float
    decode_factor: float


@dataclass(frozen=True, slots=True)
class LostSnapshot:
    instance_id: InstanceId
    role: Role
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """``is_ready``: a request could be served now, if need be by a decode instance alone."""

    is_ready: bool
    is_disaggregated: bool  # some usable prefill and decode instance may hand KV to each other
    is_registry_connected: bool
    policy: str
    instances: tuple[InstanceSnapshot, ...]
    lost: tuple[LostSnapshot, ...]  # the most recent ones, until they register again
    index_blocks: int
    index_resyncs: int
    num_reservations: int


def take_snapshot(state: RouterState, policy: str, now_ns: int) -> RouterSnapshot:
    views = sorted(state.cluster, key=lambda view: view.instance_id)
    usable = [view for view in views if view.is_usable(now_ns)]
    decodes = {view.key for view in usable if view.info.role is Role.DECODE}
    fed = {key for view in usable if view.info.role is Role.PREFILL for key in view.fed_keys}
    return RouterSnapshot(
        is_ready=any(view.info.role is not Role.PREFILL for view in usable),
        is_disaggregated=bool(decodes & fed),
        is_registry_connected=state.cluster.is_registry_connected,
        policy=policy,
        instances=tuple(_instance(state, view, now_ns) for view in views),
        lost=tuple(
            LostSnapshot(item.info.instance_id, item.info.role, item.info.epoch, item.reason)
            for item in state.cluster.lost.values()
        ),
        index_blocks=len(state.index),
        index_resyncs=state.index.num_resyncs,
        num_reservations=len(state.ledger),
    )


def _obstacle(view: InstanceView, now_ns: int) -> str:
    """What keeps requests away from ``view``; empty when nothing does."""
    if view.info.state is not InstanceState.READY:
        return f"not ready: {view.info.state.value}"
    if view.is_suspect:
        return "suspect: its load stream broke"
    if not view.breaker.allows(now_ns):
        return f"breaker {view.breaker.state(now_ns).value}"
    return ""


def _instance(state: RouterState, view: InstanceView, now_ns: int) -> InstanceSnapshot:
    info, load = view.info, view.load
    obstacle = _obstacle(view, now_ns)
    return InstanceSnapshot(
        instance_id=info.instance_id,
        role=info.role,
        state=info.state,
        epoch=info.epoch,
        address=info.address,
        model=info.model,
        is_usable=view.is_usable(now_ns),
        problem="; ".join(part for part in (obstacle, view.problem) if part),
        is_registered=view.is_registered,
        breaker=view.breaker.state(now_ns).value,
        load_age_ms=view.load_age_ms(now_ns) if load else None,
        waiting_seqs=load.waiting_seqs if load else 0,
        waiting_tokens=load.waiting_tokens if load else 0,
        running_seqs=load.running_seqs if load else 0,
        free_blocks=load.free_blocks if load else info.num_blocks,
        num_blocks=info.num_blocks,
        cached_blocks=state.index.num_blocks(info.instance_id),
        num_reservations=state.ledger.num_open(info.instance_id),
        prefill_factor=view.prefill_factor,
        decode_factor=view.decode_factor,
    )
