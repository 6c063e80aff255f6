"""What a decode instance does when a prompt cannot be computed elsewhere after all. Pure.

::

    first token not delivered  ──▶ ask another prefill instance, once, while there is time for it
                               ──▶ compute the same request here
    first token delivered      ──▶ resume here: prompt + first token, sampling goes on at token 1

The client sees only latency, unless the request itself is at fault (that error is final wherever
the request goes) or its class of service wants failures to show (``transfer.on_failure``).
"""

from __future__ import annotations

from dataclasses import replace

from isthmus.common.clock import NS_PER_MS
from isthmus.common.errors import (
    AuthenticationError,
    ContextLengthError,
    IsthmusError,
    ModelNotFoundError,
    UnsupportedParameterError,
)
from isthmus.common.types import Remedy, Request

# A plain InvalidRequestError is not among them: this instance has checked the request itself, so it
# means that the two instances disagree, about a ticket for instance.
_FINAL = (
    AuthenticationError,
    ContextLengthError,
    ModelNotFoundError,
    UnsupportedParameterError,
)


def can_fall_back(error: IsthmusError) -> bool:
    """True when computing the prompt here may still serve the request.

    A CancelledError or DeadlineError is about the transfer: the request's own end and deadline
    never come this way.
    """
    return not isinstance(error, _FINAL)


def remedy_for(policy: Remedy, can_reprefill: bool) -> Remedy:
    """What to do about a fault that is not the request's own. ``can_reprefill``: there is somebody
    else to ask, and time."""
    return Remedy.RECOMPUTE if policy is Remedy.REPREFILL and not can_reprefill else policy


def has_time(now_ns: int, deadline_ns: int, predicted_ttft_ms: float) -> bool:
    """Whether another attempt may take as long as the first was predicted to, and fail, and still
    leave as much for computing the prompt here."""
    return now_ns + 2 * predicted_ttft_ms * NS_PER_MS < deadline_ns


def resumed(request: Request, delivered: tuple[int, ...]) -> Request:
    """The request that continues after ``delivered`` tokens; itself when there are none."""
    if not delivered:
        return request
    return replace(
        request,
        token_ids=request.token_ids + delivered,
        num_resumed_tokens=request.num_resumed_tokens + len(delivered),
        # They were delivered with the first token.
        sampling=replace(request.sampling, prompt_logprobs=None),
    )
