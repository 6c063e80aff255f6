"""What the router answers: now, or later for who waits.

How to use the seam (a gateway with its event loop, the simulator with its own clock)::

    verdict = router.submit(query)      Admitted(decision) | Held(request_id, …) | Rejected(error)
    settled = router.tick()             those held whose wait is over: Admitted or Rejected
    router.next_tick_ns()               monotonic time by which to call ``tick`` again; None = never
    router.cancel(request_id)           the client left: nothing more is said about it
    router.on_progress = wake           called when a tick may settle something: a load report came,
                                        an outcome freed a place, an instance came or went
    router.report(decision_id, outcome) as ever: FIRST_TOKEN frees prefill, an end frees the rest

All are synchronous, take their time from the router's ``Clock`` and never wait. A query is settled
exactly once, by ``submit`` or by one ``tick``, unless it is cancelled. ``on_progress`` only says
that calling ``tick`` is worth while; it is called often, so coalesce: one ``tick`` a turn of the
event loop, or one at the same virtual time, does. ``route`` remains for what must not wait (a
retry, a stream that is resumed): it decides at once or raises.

A held query ends by itself: its deadline (``RouteQuery.deadline_ns``) makes it a Rejected with
DeadlineError, no instance for it NoInstanceError, a target that cannot be met any more SloShedError
if its class is strict. Both legs or neither: an Admitted decision has its decode blocks and its
prefill work booked in the ledger, a Held or Rejected one has nothing anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import RequestId
from isthmus.common.types import RouteDecision


@dataclass(frozen=True, slots=True)
class Admitted:
    decision: RouteDecision


@dataclass(frozen=True, slots=True)
class Held:
    """``latest_start_ns``: router's monotonic time at which its first token could still be in time
    by prediction; None without a target that can be met."""

    request_id: RequestId
    latest_start_ns: int | None


@dataclass(frozen=True, slots=True)
class Rejected:
    """Nothing was booked. ``error`` says why, and where that makes sense when to come back."""

    error: IsthmusError


Verdict = Admitted | Held | Rejected


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of one query's wait."""

    request_id: RequestId
    verdict: Admitted | Rejected
