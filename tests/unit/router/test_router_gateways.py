"""A gateway that dies leaves no reservation behind; one that reconnects keeps its own."""

from __future__ import annotations

import pytest

from isthmus.router import Outcome, Router
from isthmus.router.gateways import OpenDecisions
from tests.support.poll import poll_until
from tests.support.router_cluster import Cluster, make_query

TTL_MS = 1_000


@pytest.fixture
def router() -> Router:
    return Cluster(1, 1).router


@pytest.mark.asyncio
async def test_open_decisions_end_with_the_gateway_that_has_them(router: Router) -> None:
    opened = OpenDecisions(router, grace_s=0.02)
    opened.stream_begins("a")
    opened.stream_begins("b")
    for gateway, name in (("a", "1"), ("a", "2"), ("b", "3")):
        opened.made(gateway, router.route(make_query(name=name)).decision_id)
    opened.stream_ends("a")
    await poll_until(lambda: router.snapshot().num_reservations == 1)
    opened.close()


@pytest.mark.asyncio
async def test_a_stream_that_comes_back_keeps_what_was_open(router: Router) -> None:
    opened = OpenDecisions(router, grace_s=3_600)
    opened.stream_begins("a")
    decision = router.route(make_query())
    opened.made("a", decision.decision_id)
    opened.stream_ends("a")
    opened.stream_begins("a")
    assert opened._gateways["a"].ends is None
    opened.told("a", decision.decision_id, Outcome.first_token())
    assert router.snapshot().num_reservations == 1
    opened.told("a", decision.decision_id, Outcome.finished())
    assert router.snapshot().num_reservations == 0
    assert not opened._gateways["a"].open
    opened.close()


@pytest.mark.asyncio
async def test_a_gateway_that_never_opens_its_stream_is_doubted_too(router: Router) -> None:
    opened = OpenDecisions(router, grace_s=0.02)
    opened.made("mute", router.route(make_query()).decision_id)
    await poll_until(lambda: router.snapshot().num_reservations == 0)
    assert "mute" not in opened._gateways
    opened.close()


@pytest.mark.asyncio
async def test_what_has_expired_is_open_no_more() -> None:
    cluster = Cluster(1, 1, reservation_ttl_ms=TTL_MS)
    opened = OpenDecisions(cluster.router, grace_s=3_600)
    opened.stream_begins("a")
    for name in ("1", "2"):
        opened.made("a", cluster.router.route(make_query(name=name)).decision_id)
    cluster.clock.advance_ms(TTL_MS + 1)
    last = cluster.router.route(make_query(name="3")).decision_id
    opened.made("a", last)
    assert list(opened._gateways["a"].open) == [last]
    opened.close()
