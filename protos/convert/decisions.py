"""What a router has decided."""

from __future__ import annotations

from isthmus.common.ids import DecisionId, RequestId
from isthmus.common.types import InstanceRef, LocalPrefillReason, RouteAction, RouteDecision
from isthmus.protos.convert.instances import ref_from_pb
from isthmus.protos.convert.requests import Fields
from isthmus.protos.convert.times import instant_after, ms_left
from isthmus.protos.v1 import router_pb2

_ACTION_TO_PB = {
    RouteAction.ADMIT: router_pb2.ROUTE_ACTION_ADMIT,
    RouteAction.QUEUE: router_pb2.ROUTE_ACTION_QUEUE,
    RouteAction.DEGRADE: router_pb2.ROUTE_ACTION_DEGRADE,
}
_ACTION_FROM_PB = {value: key for key, value in _ACTION_TO_PB.items()}
_LOCAL_REASONS = {reason.value: reason for reason in LocalPrefillReason}


def decision_to_pb(decision: RouteDecision) -> router_pb2.RouteDecision:
    return router_pb2.RouteDecision(**decision_fields(decision))


def decision_fields(decision: RouteDecision) -> Fields:
    """For a message that has a decision in it."""
    return {
        "decision_id": decision.decision_id,
        "request_id": decision.request_id,
        "action": _ACTION_TO_PB[decision.action],
        "decode": _ref_fields(decision.decode),
        "prefill": _ref_fields(decision.prefill),
        "alternate": _ref_fields(decision.alternate),
        "local_reason": decision.local_reason.value,
        "cached_tokens": decision.cached_tokens,
        "predicted_ttft_ms": decision.predicted_ttft_ms,
        "predicted_tpot_ms": decision.predicted_tpot_ms,
        "policy": decision.policy,
        "reason": decision.reason,
        "ttl_ms": ms_left(decision.expires_ns),
    }


def _ref_fields(ref: InstanceRef | None) -> Fields | None:
    if ref is None:
        return None
    return {"instance_id": ref.instance_id, "epoch": ref.epoch, "address": ref.address}


def local_reason_from_pb(value: str) -> LocalPrefillReason:
    """POLICY for a reason that is not known here: the prompt is computed there all the same."""
    return _LOCAL_REASONS.get(value or LocalPrefillReason.NONE.value, LocalPrefillReason.POLICY)


def decision_from_pb(message: router_pb2.RouteDecision) -> RouteDecision:
    """An action that is not known here admits: a refusal is an error, and not a decision."""
    return RouteDecision(
        decision_id=DecisionId(message.decision_id),
        request_id=RequestId(message.request_id),
        action=_ACTION_FROM_PB.get(message.action, RouteAction.ADMIT),
        decode=ref_from_pb(message.decode) if message.HasField("decode") else None,
        prefill=ref_from_pb(message.prefill) if message.HasField("prefill") else None,
        alternate=ref_from_pb(message.alternate) if message.HasField("alternate") else None,
        local_reason=local_reason_from_pb(message.local_reason),
        cached_tokens=message.cached_tokens,
        predicted_ttft_ms=message.predicted_ttft_ms,
        predicted_tpot_ms=message.predicted_tpot_ms,
        policy=message.policy,
        reason=message.reason,
        expires_ns=instant_after(message.ttl_ms),
    )
