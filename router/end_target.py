"""What a target of the end (E2E) leaves for the first token, from which on all else is reckoned.

Whoever is to end in time must begin in time: of an E2E target remains for the TTFT what the tokens
that are expected after the first do not take. The place in line, the latest start, overload and
infeasibility then follow as from any other TTFT target; a tighter one of the request's own stays.
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.common.cluster import Role
from isthmus.router.cluster_view import InstanceView
from isthmus.router.state import RouterState
from isthmus.router.types import RouteQuery

LEAST_MS = 0.001  # a target is more than nothing, and this one nobody meets
LEAST_SHARE = 0.5
"""Of what an idle instance would leave: load passes, and is no reason to call a request too long
for its target."""


def bounded_by_end(query: RouteQuery, output_tokens: int, state: RouterState) -> RouteQuery:
    """``query`` with the TTFT target that its E2E target means for an answer of that length; the
    same without one, and where its TTFT target is tighter."""
    slo = query.slo
    if slo.e2e_ms is None:
        return query
    idle_ms, loaded_ms = _least_steps_ms(query, output_tokens, state)
    num_gaps = output_tokens - 1
    idle_left_ms = slo.e2e_ms - num_gaps * idle_ms
    left_ms = max(slo.e2e_ms - num_gaps * loaded_ms, LEAST_SHARE * idle_left_ms, LEAST_MS)
    if slo.ttft_ms is not None and slo.ttft_ms <= left_ms:
        return query
    return replace(query, slo=replace(slo, ttft_ms=left_ms), is_bound_by_end=True)


def _least_steps_ms(
    query: RouteQuery, output_tokens: int, state: RouterState
) -> tuple[float, float]:
    """A decode step of the quickest instance, alone and beside all that it serves now; 0 where
    there is nobody."""
    context = query.num_prompt_tokens + output_tokens // 2
    idle: list[float] = []
    loaded: list[float] = []
    for view in state.cluster.by_role(Role.DECODE, Role.MIXED):
        if view.info.model == query.model:
            num_seqs, tokens = _residents(view, state)
            idle.append(_step_ms(view, 1, context))
            loaded.append(_step_ms(view, num_seqs + 1, tokens + context))
    return min(idle, default=0.0), min(loaded, default=0.0)


def _step_ms(view: InstanceView, num_seqs: int, context: int) -> float:
    return view.decode_factor * view.latency.decode_step_ms(num_seqs, context)


def _residents(view: InstanceView, state: RouterState) -> tuple[int, int]:
    """Sequences and tokens of context, as reported and as on their way to it."""
    pending, load = state.ledger.pending(view.instance_id), view.load
    num_seqs, context = pending.decode_seqs, pending.decode_context_tokens
    if load is not None:
        num_seqs += load.running_seqs + load.waiting_seqs
        context += load.running_context_tokens + load.waiting_tokens
    return num_seqs, context
