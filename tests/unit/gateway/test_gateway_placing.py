"""A sequence finds its instance, waits for one, or hears why not: once, and not after a cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.errors import (
    CapacityError,
    InstanceLostError,
    IsthmusError,
    NoInstanceError,
    OutOfBlocksError,
)
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.types import RouteAction, RouteDecision, SamplingParams
from isthmus.gateway.decider import Asker
from isthmus.gateway.placing import PLACING_TRANSITIONS, Placing, PlacingState
from isthmus.gateway.plan import GenerationPlan, PreparedPrompt
from isthmus.gateway.router_client import ChoiceQuery, RouterClient
from isthmus.gateway.waiting import WaitingRoom
from tests.support.poll import poll_until

PROMPT = PreparedPrompt("x", (5,), (), 4)
PLAN = GenerationPlan("r", "tiny", (PROMPT,), 1, SamplingParams(), (), 0, 10**18)
DECISION = RouteDecision(DecisionId("d"), RequestId("r"), RouteAction.ADMIT, None, None)
NOBODY = NoInstanceError("nobody", stage="route")


def query(num_resumed: int = 0) -> ChoiceQuery:
    return ChoiceQuery(RequestId("r-0.0"), PLAN, PROMPT, num_resumed, frozenset(), None, False)


class Bench:
    """Router and owner of one placing; the test answers for the router."""

    def __init__(self, wait_ms: int = 0) -> None:
        self.can_serve = False
        self.asked: list[bool] = []
        self.withdrawn: list[RequestId] = []
        self.heard: list[RouteDecision | IsthmusError] = []
        self.room = WaitingRoom(lambda: self.can_serve, wait_ms, lambda: "pool_empty")
        self.placing = Placing(cast("RouterClient", self), self.room, self)

    # --- RouterClient ---
    def route(self, _: ChoiceQuery, asker: Asker, *, may_wait: bool) -> None:
        assert asker is self.placing
        self.asked.append(may_wait)

    def reroute(self, _: ChoiceQuery, *rest: Any) -> None:
        assert rest[-1] is self.placing
        self.asked.append(False)

    def withdraw(self, request_id: RequestId) -> None:
        self.withdrawn.append(request_id)

    # --- Placeable ---
    def on_placed(self, decision: RouteDecision) -> None:
        self.heard.append(decision)

    def on_unplaced(self, error: IsthmusError) -> None:
        self.heard.append(error)

    def fresh_query(self) -> ChoiceQuery:
        return query()

    def again(self, cause: IsthmusError) -> None:
        self.placing.again(query(), DECISION, cause, InstanceId("d0"))


def test_a_decision_is_heard_once() -> None:
    bench = Bench()
    bench.placing.first(query(), may_wait=True)
    assert bench.placing.is_waiting
    bench.placing.on_routed(DECISION)
    assert (bench.heard, bench.asked) == ([DECISION], [True])
    assert not bench.placing.is_waiting


@pytest.mark.parametrize("cause", [OutOfBlocksError("full"), InstanceLostError("gone")])
def test_with_nobody_else_to_ask_the_first_fault_is_heard(cause: IsthmusError) -> None:
    bench = Bench()
    bench.again(cause)
    bench.placing.on_refused(NOBODY)
    assert bench.heard == [cause]


@pytest.mark.asyncio
async def test_who_waits_is_tried_again_until_somebody_can_serve_it() -> None:
    bench = Bench(wait_ms=60_000)
    bench.placing.first(query(), may_wait=True)
    bench.placing.on_refused(NOBODY)
    assert bench.placing.state is PlacingState.HELD
    bench.can_serve = True
    await poll_until(lambda: len(bench.asked) == 2)
    bench.can_serve = False
    bench.placing.on_refused(NOBODY)  # it went again
    assert bench.placing.state is PlacingState.HELD
    bench.can_serve = True
    await poll_until(lambda: len(bench.asked) == 3)
    bench.placing.on_routed(DECISION)
    assert bench.heard == [DECISION]
    bench.room.close()


@pytest.mark.asyncio
async def test_a_refusal_that_waiting_cannot_mend_is_heard_at_once() -> None:
    bench = Bench(wait_ms=60_000)
    full = CapacityError("full")
    bench.placing.first(query(), may_wait=True)
    bench.placing.on_refused(full)
    assert bench.heard == [full]
    bench.room.close()


@pytest.mark.asyncio
async def test_a_wait_for_nothing_ends_with_its_cause() -> None:
    bench = Bench(wait_ms=1)
    bench.placing.first(query(), may_wait=True)
    bench.placing.on_refused(NOBODY)
    await poll_until(lambda: bool(bench.heard))
    (error,) = bench.heard
    assert isinstance(error, NoInstanceError)
    assert "nobody; no decode or mixed instance became ready" in error.message
    bench.room.close()


CANCELS: dict[str, Callable[[Bench], None]] = {
    "idle": lambda _: None,
    "asking": lambda bench: bench.placing.first(query(), may_wait=True),
    "held": lambda bench: (
        bench.placing.first(query(), may_wait=True),
        bench.placing.on_refused(NOBODY),
    )[0],
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CANCELS)
async def test_a_cancel_leaves_nothing_and_nothing_is_heard(name: str) -> None:
    bench = Bench(wait_ms=60_000)
    CANCELS[name](bench)
    bench.placing.cancel()
    bench.placing.cancel()
    assert not bench.placing.is_waiting
    assert bench.withdrawn == (["r-0.0"] if name == "asking" else [])
    assert not bench.room._holds
    bench.can_serve = True
    await asyncio.sleep(0)
    assert bench.heard == []
    bench.room.close()


@given(st.lists(st.sampled_from(["first", "routed", "refused", "lost", "cancel"]), max_size=12))
def test_whatever_happens_each_question_has_one_end(moves: list[str]) -> None:
    """With a closed room; moves that its life cycle does not know are left out."""
    bench, num_asked, num_cancelled = Bench(), 0, 0
    for move in moves:
        is_asking = bench.placing.state is PlacingState.ASKING
        if move in ("first", "lost") and not is_asking:
            num_asked += 1
            if move == "first":
                bench.placing.first(query(), may_wait=True)
            else:
                bench.again(InstanceLostError("gone"))
        elif move == "cancel":
            num_cancelled += is_asking
            bench.placing.cancel()
        elif move == "routed" and is_asking:
            bench.placing.on_routed(DECISION)
        elif move == "refused" and is_asking:
            bench.placing.on_refused(NOBODY)
    num_open = int(bench.placing.is_waiting)
    assert num_asked == len(bench.heard) + num_cancelled + num_open
    assert len(bench.withdrawn) == num_cancelled


def test_every_state_can_be_left() -> None:
    assert not any(PLACING_TRANSITIONS.is_terminal(state) for state in PlacingState)


def test_who_waited_for_nothing_hears_why_nobody_can_serve() -> None:
    room = WaitingRoom(lambda: False, 1, lambda: "pool_empty")
    assert room.refusal(None).reason == "pool_empty"
