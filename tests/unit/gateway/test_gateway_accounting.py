"""What is counted of a request: why the router decided as it did, and whether it was demand."""

from __future__ import annotations

import pytest

from isthmus.common import metrics
from isthmus.common.clock import VirtualClock
from isthmus.common.errors import DeadlineError
from isthmus.common.ids import DecisionId, RequestId
from isthmus.common.types import RouteAction, RouteDecision
from isthmus.gateway.accounting import Offer, count_refused, decision_reason
from isthmus.gateway.goodput import GoodputWindow


@pytest.mark.parametrize("action", RouteAction)
def test_what_a_requests_size_makes_impossible_is_counted_apart_from_lateness(
    action: RouteAction,
) -> None:
    decision = RouteDecision(
        DecisionId("d"), RequestId("r"), action, None, None, reason="first of 2 candidates"
    )
    plain = {"admit": "at_once", "queue": "after_wait", "degrade": "late"}
    assert decision_reason(decision) == plain[action.value]


def test_served_infeasible_request_is_told_apart() -> None:
    decision = RouteDecision(
        DecisionId("d"),
        RequestId("r"),
        RouteAction.DEGRADE,
        None,
        None,
        reason="slo_infeasible: first of 2 candidates",
    )
    assert decision_reason(decision) == "slo_infeasible"


def test_a_request_that_fails_before_its_body_is_read_is_demand_in_every_figure() -> None:
    demand = metrics.REQUESTS_OFFERED.labels(slo_class="default", tenant="slow-sender")
    before, goodput = demand._value.get(), GoodputWindow(VirtualClock())
    error = DeadlineError("the body did not arrive in time", stage="receive")
    count_refused("r", error, Offer("default", "slow-sender"), goodput)
    assert demand._value.get() == before + 1
    assert goodput.ratios() == {("default", "slow-sender"): 0.0}
