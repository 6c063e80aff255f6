"""Whether the gateway can serve: somebody decodes, can be reached, and gets on with it."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common.cluster import InstanceState, Role
from isthmus.gateway.decode_client import DecodeClient
from isthmus.gateway.router_client import RouterClient

STALL_S = 30.0
"""Silence of an instance with requests waiting on it after which it does not count as serving."""


@dataclass(frozen=True, slots=True)
class Readiness:
    is_ready: bool
    reasons: list[str]
    instances: dict[str, str]
    """Instance id → role and what the gateway sees of it."""


def assess(router: RouterClient, decode_client: DecodeClient) -> Readiness:
    """Ready with at least one decode or mixed instance that is READY, connected and not stalled."""
    seen: dict[str, str] = {}
    reasons: list[str] = []
    num_serving = 0
    for info in router.instances():
        seen[info.instance_id] = f"{info.role.value} {info.state.value}"
        if info.role is Role.PREFILL:
            continue
        if info.state is not InstanceState.READY:
            reasons.append(f"{info.instance_id} is {info.state.value}")
        elif not decode_client.is_live(info.instance_id):
            reasons.append(f"{info.instance_id} is not connected")
        elif (silent_s := decode_client.silent_s(info.instance_id)) > STALL_S:
            reasons.append(f"{info.instance_id} has made no progress for {silent_s:.0f} s")
        else:
            num_serving += 1
    if not num_serving and not reasons:
        reasons.append("no decode or mixed instance is registered")
    return Readiness(num_serving > 0, reasons, seen)
