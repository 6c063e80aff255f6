"""The errors that tell a client why its request is refused before it is bound to anybody."""

from __future__ import annotations

from isthmus.common.backoff import retry_after_ms
from isthmus.common.errors import (
    CapacityError,
    DeadlineError,
    InfeasibleSloError,
    InvalidRequestError,
    SloShedError,
)
from isthmus.common.ids import RequestId
from isthmus.router.placement import Look
from isthmus.router.types import RouteQuery


def shed(query: RouteQuery, predicted_ms: float, backlog_ms: float) -> SloShedError:
    """For load. ``predicted_ms``: from its arrival until its first token."""
    limit_ms = query.slo.ttft_ms
    return SloShedError(
        f"the first token would come after about {predicted_ms:.0f} ms, and "
        f"{_target(query)} {limit_ms:.6g} ms",
        stage="route",
        reason="overload",
        predicted_ms=predicted_ms,
        limit_ms=limit_ms,
        retry_after_ms=retry_after_ms(backlog_ms),
    )


def queue_full(num_held: int, backlog_ms: float) -> CapacityError:
    return CapacityError(
        f"{num_held} requests wait already",
        stage="route",
        reason="queue_full",
        retry_after_ms=retry_after_ms(backlog_ms),
    )


def expired(waited_ms: float) -> DeadlineError:
    message = f"the request's deadline came while it waited ({waited_ms:.0f} ms)"
    return DeadlineError(message, stage="route")


def duplicate(request_id: RequestId) -> InvalidRequestError:
    """Not noted as a refusal: that would be taken for the end of the one that waits."""
    message = f"a request with the id {request_id!r} waits already"
    return InvalidRequestError(message, stage="route", param="request_id")


def infeasible(query: RouteQuery, look: Look) -> InfeasibleSloError:
    """Not for load: for the size of the request, or the speed of the instances."""
    slo = query.slo
    limit_ms: float | None
    if slo.ttft_ms is not None and look.least_ttft_ms > slo.ttft_ms:
        what, predicted_ms, limit_ms = "TTFT", look.least_ttft_ms, slo.ttft_ms
        target = _target(query)
    else:
        what, predicted_ms, limit_ms = "TPOT", look.least_tpot_ms, slo.tpot_ms
        target = f"the target of class {slo.class_name} is"
    return InfeasibleSloError(
        f"{query.num_prompt_tokens} prompt tokens mean a {what} of {predicted_ms:.0f} ms even on "
        f"an idle instance; {target} {limit_ms:.6g} ms",
        stage="route",
        reason="slo_infeasible",
        predicted_ms=predicted_ms,
        limit_ms=limit_ms,
    )


def _target(query: RouteQuery) -> str:
    """Of its first token, to be followed by how many milliseconds."""
    of_class = f"of class {query.slo.class_name}"
    if query.is_bound_by_end:
        return f"the E2E target {of_class}, {query.slo.e2e_ms:g} ms, leaves for it"
    return f"the target {of_class} is"
