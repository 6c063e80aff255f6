"""Who may be chosen at all, and what to say when nobody may.

Every exclusion has a reason, so that a decision can be explained and a refusal can name its cause
and a time to come back at: the shortest time after which one of the excluded might be available.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from isthmus.common.backoff import retry_after_ms
from isthmus.common.cluster import InstanceState
from isthmus.common.errors import (
    CapacityError,
    ContextLengthError,
    IsthmusError,
    ModelNotFoundError,
    NoInstanceError,
)
from isthmus.common.ids import InstanceId
from isthmus.router.cluster_view import InstanceView
from isthmus.router.predictor import DecodeOption
from isthmus.router.types import RouteQuery

MAX_QUEUE_FACTOR = 8  # sequences per place of a decode instance, beyond which requests are refused
SUSPECT_RETRY_MS = 1_000
STARTING_RETRY_MS = 3_000
RETRY_MS = 5_000


class FilterReason(Enum):
    OTHER_MODEL = "other_model"
    EXCLUDED = "excluded"
    NOT_READY = "not_ready"
    SUSPECT = "suspect"
    BREAKER_OPEN = "breaker_open"
    TOO_LONG = "too_long"  # more tokens than its context length
    TOO_BIG = "too_big"  # more blocks than it has
    INCOMPATIBLE = "incompatible"
    FULL = "full"
    NOT_PREFERRED = "not_preferred"


_READY = InstanceState.READY
_INFEASIBLE = frozenset({FilterReason.TOO_LONG, FilterReason.TOO_BIG})


def filter_reason(view: InstanceView, query: RouteQuery, now_ns: int) -> FilterReason | None:
    """Why ``view`` cannot serve ``query`` now; None when it can."""
    info = view.info
    if info.model != query.model:
        return FilterReason.OTHER_MODEL
    if query.num_prompt_tokens > view.longest_prompt:
        is_long = query.num_prompt_tokens >= info.max_model_len
        return FilterReason.TOO_LONG if is_long else FilterReason.TOO_BIG
    if info.state is not _READY:
        return FilterReason.NOT_READY
    if view.is_suspect:
        return FilterReason.SUSPECT
    if query.exclude and info.instance_id in query.exclude:
        return FilterReason.EXCLUDED
    if not view.breaker.is_closed and not view.breaker.allows(now_ns):
        return FilterReason.BREAKER_OPEN
    return None


def refusal(
    query: RouteQuery,
    views: Sequence[InstanceView],
    filtered: Mapping[InstanceId, FilterReason],
    now_ns: int,
) -> IsthmusError:
    """The error for a query that no decode or mixed instance can take. ``views`` = all of those."""
    of_model = [view for view in views if view.info.model == query.model]
    if views and not of_model:
        known = ", ".join(sorted({view.info.model for view in views}))
        return ModelNotFoundError(
            f"model {query.model!r} is not served here; served: {known}",
            stage="route",
            param="model",
        )
    reasons = {view.instance_id: filtered.get(view.instance_id) for view in of_model}
    if of_model and all(reason in _INFEASIBLE for reason in reasons.values()):
        limit = max(view.longest_prompt for view in of_model)
        return ContextLengthError(
            f"the prompt has {query.num_prompt_tokens} tokens; with at least one output token no "
            f"instance can hold more than {limit}",
            stage="route",
            param="messages",
        )
    named = ", ".join(f"{name}: {reason.value}" for name, reason in reasons.items() if reason)
    waits = [_wait_ms(view, reasons[view.instance_id], now_ns) for view in of_model]
    return NoInstanceError(
        f"no decode instance available ({named or 'none is registered'})",
        stage="route",
        retry_after_ms=retry_after_ms(min(waits, default=RETRY_MS)),
        reason=why_nobody(of_model),
    )


def why_nobody(of_model: Sequence[InstanceView]) -> str:
    """In one word, for the instance that is nearest to being able to."""
    if not of_model:
        return "pool_empty"
    states = {view.info.state for view in of_model if not view.is_suspect}
    if InstanceState.READY in states or not states:
        return "out_of_reach"  # its breaker is open, its stream broke, or it is excluded
    return "starting" if InstanceState.STARTING in states else "draining"


def overload(options: Iterable[DecodeOption]) -> CapacityError | None:
    """Refuses when every decode instance has a queue that nobody should wait in."""
    waits: list[float] = []
    for option in options:
        if option.num_seqs < MAX_QUEUE_FACTOR * option.view.info.max_num_seqs:
            return None
        waits.append(option.wait_ms)
    return CapacityError(
        "every decode instance has a full queue",
        stage="route",
        retry_after_ms=retry_after_ms(min(waits)),
    )


def _wait_ms(view: InstanceView, reason: FilterReason | None, now_ns: int) -> int:
    if reason is FilterReason.BREAKER_OPEN:
        return view.breaker.wait_ms(now_ns)
    if reason is FilterReason.SUSPECT:
        return SUSPECT_RETRY_MS
    if reason is FilterReason.NOT_READY and view.info.state is InstanceState.STARTING:
        return STARTING_RETRY_MS
    return RETRY_MS
