"""Finding an instance for one sequence: asking the router, and waiting where that is worth while.

::

    IDLE ── first, again ──▶ ASKING ── decision (on_placed), refusal (on_unplaced) ──▶ IDLE
                              │  ▲
           nobody can serve   ▼  │  an instance can
                              HELD ── the time is up (on_unplaced) ──▶ IDLE
    any ── cancel ──▶ IDLE, and nothing more is heard

Callbacks of the event loop; owns no task. A question at the router and a place in the waiting room
are its only resources, of which it has one at most.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from isthmus.common.errors import InstanceError, IsthmusError, NoInstanceError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.state_machine import Transitions
from isthmus.common.types import RouteDecision
from isthmus.gateway.router_client import ChoiceQuery, RouterClient
from isthmus.gateway.waiting import Hold, WaitingRoom


class PlacingState(Enum):
    IDLE = "idle"
    ASKING = "asking"
    HELD = "held"

    __hash__ = object.__hash__  # looked up many times a request


PLACING_TRANSITIONS: Transitions[PlacingState] = Transitions(
    {
        PlacingState.IDLE: frozenset({PlacingState.ASKING}),
        PlacingState.ASKING: frozenset({PlacingState.IDLE, PlacingState.HELD}),
        PlacingState.HELD: frozenset({PlacingState.IDLE, PlacingState.ASKING}),
    }
)


class Placeable(Protocol):
    """The sequence. Hears one of the first two for each ``first`` and ``again``."""

    def on_placed(self, decision: RouteDecision) -> None: ...

    def on_unplaced(self, error: IsthmusError) -> None: ...

    def fresh_query(self) -> ChoiceQuery:
        """For another try after a wait: instances that are back will do."""
        ...


class Placing:
    """Implements ``Asker`` for its owner."""

    def __init__(self, router: RouterClient, room: WaitingRoom, owner: Placeable) -> None:
        self.state = PlacingState.IDLE
        self._router = router
        self._room = room
        self._owner = owner
        self._asked = RequestId("")
        self._hold: Hold | None = None
        self._on_refusal: Callable[[IsthmusError], None] = self._unplaced

    @property
    def is_waiting(self) -> bool:
        """For the router's answer, or for an instance to be ready."""
        return self.state is not PlacingState.IDLE

    def first(self, query: ChoiceQuery, *, may_wait: bool) -> None:
        self._begin(query, self._refused)
        self._router.route(query, self, may_wait=may_wait)

    def again(
        self, query: ChoiceQuery, last: RouteDecision, cause: IsthmusError, failed: InstanceId
    ) -> None:
        """After ``last`` came to nothing because of ``cause``, which is what the owner hears if
        there is nobody else to ask."""
        self._begin(query, lambda refusal: self._refused_after(cause, refusal))
        self._router.reroute(query, last, cause, failed, self)

    def cancel(self) -> None:
        if self.state is PlacingState.ASKING:
            self._router.withdraw(self._asked)
        elif self._hold is not None:
            self._room.cancel(self._hold)
            self._hold = None
        if self.is_waiting:
            self._move(PlacingState.IDLE)

    # --- Asker ----------------------------------------------------------------------------------
    def on_routed(self, decision: RouteDecision) -> None:
        self._move(PlacingState.IDLE)
        self._owner.on_placed(decision)

    def on_refused(self, error: IsthmusError) -> None:
        self._on_refusal(error)

    # --- inside ---------------------------------------------------------------------------------
    def _begin(self, query: ChoiceQuery, on_refusal: Callable[[IsthmusError], None]) -> None:
        self._move(PlacingState.ASKING)
        self._asked, self._on_refusal = query.request_id, on_refusal

    def _refused(self, error: IsthmusError) -> None:
        if isinstance(error, NoInstanceError) and self._room.is_open:
            self._wait(error, self._room.ends_s())
        else:
            self._unplaced(error)

    def _refused_after(self, cause: IsthmusError, refusal: IsthmusError) -> None:
        is_nobody = isinstance(refusal, NoInstanceError) and isinstance(cause, InstanceError)
        if is_nobody and self._room.is_open:
            self._wait(cause, self._room.ends_s())
        else:
            self._unplaced(cause)  # those there are were asked, and are well

    def _wait(self, cause: IsthmusError, until_s: float) -> None:
        """``cause``: what the owner hears, with the wait, if it was for nothing."""
        self._move(PlacingState.HELD)

        def retry() -> None:
            self._hold = None
            query = self._owner.fresh_query()
            self._begin(query, again)
            self._router.route(query, self, may_wait=not query.num_resumed_tokens)

        def again(error: IsthmusError) -> None:
            if not isinstance(error, NoInstanceError):
                self._unplaced(error)
            elif self._room.is_over(until_s):
                give_up()
            else:
                self._wait(cause, until_s)

        def give_up() -> None:
            self._hold = None
            self._unplaced(self._room.refusal(cause))

        self._hold = self._room.hold(retry, give_up, until_s)

    def _unplaced(self, error: IsthmusError) -> None:
        self._move(PlacingState.IDLE)
        self._owner.on_unplaced(error)

    def _move(self, state: PlacingState) -> None:
        self.state = PLACING_TRANSITIONS.check(self.state, state)
