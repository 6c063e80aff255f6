"""Why the router decided as it did, as it is counted."""

from __future__ import annotations

import pytest

from isthmus.common.ids import DecisionId, RequestId
from isthmus.common.types import RouteAction, RouteDecision
from isthmus.gateway.accounting import decision_reason


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
