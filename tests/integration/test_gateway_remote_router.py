"""A gateway and routers of other processes: who decides, and what becomes of questions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import pytest_asyncio

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_MS, VirtualClock
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import (
    CapacityError,
    DeadlineError,
    InstanceLostError,
    InternalError,
    IsthmusError,
    NoInstanceError,
)
from isthmus.common.ids import InstanceId
from isthmus.common.registry import Candidate, MemoryRegistry, deciders_prefix, election
from isthmus.common.registry.base import Listing
from isthmus.common.registry.presence import Presence
from isthmus.common.types import RouteDecision
from isthmus.gateway import pulse
from isthmus.gateway.remote_router import RemoteDecider
from isthmus.protos.v1 import router_pb2 as pb
from isthmus.router import Held, Outcome, OutcomeKind, Rejected, RouteQuery, Verdict, service
from isthmus.router.explain_client import explain, find_deciders
from isthmus.router.explain_host import ExplainHost
from isthmus.router.wire import query_to_pb
from tests.support.poll import poll_until
from tests.support.router_cluster import make_query
from tests.support.routers import PATIENCE_S, Asker, HostedRouter, remote_decider, running_registry

OWN_POLICY = "fallback_least_loaded"
EXPIRY_PERIOD_MS = 100  # between two looks of a registry at its leases


@pytest_asyncio.fixture
async def registry() -> AsyncIterator[MemoryRegistry]:
    async with running_registry() as made:
        yield made


@asynccontextmanager
async def led(registry: MemoryRegistry) -> AsyncIterator[tuple[HostedRouter, RemoteDecider]]:
    """A router that leads, and a gateway that knows it."""
    leader = await HostedRouter(registry, "router-0").start()
    try:
        await leader.leads()
        async with remote_decider(registry) as decider:
            await poll_until(lambda: decider.leader == leader.record)
            yield leader, decider
    finally:
        await leader.host.close()


class Awaited(asyncio.Event):
    """Not set, and tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.is_awaited.set()
        return await super().wait()


def fallbacks() -> float:
    samples = next(iter(metrics.ROUTER_FALLBACK.collect())).samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def hold_everything(router: HostedRouter, monkeypatch: pytest.MonkeyPatch) -> list[RouteQuery]:
    """Questions that may wait do, for ever."""
    held: list[RouteQuery] = []

    def submit(query: RouteQuery) -> Verdict:
        held.append(query)
        return Held(query.request_id, None)

    monkeypatch.setattr(router.router, "submit", submit)
    return held


@pytest.mark.asyncio
async def test_the_leader_decides_and_learns_what_became_of_it(registry: MemoryRegistry) -> None:
    async with led(registry) as (leader, decider):
        before, asker = fallbacks(), Asker()
        decider.ask(make_query(name="r-0.0"), asker, may_wait=True)
        decision = await asker.answer()
        assert decision.policy == leader.router.snapshot().policy
        assert leader.router.snapshot().num_reservations == 1
        decider.report(decision.decision_id, Outcome.first_token())
        decider.report(decision.decision_id, Outcome.finished(5.0))
        await poll_until(lambda: leader.router.snapshot().num_reservations == 0)
        record = leader.router.log.get(decision.decision_id)
        assert record is not None
        assert record.outcomes == [OutcomeKind.FIRST_TOKEN, OutcomeKind.FINISHED]
        assert fallbacks() == before


@pytest.mark.asyncio
async def test_another_decision_avoids_who_failed(registry: MemoryRegistry) -> None:
    async with led(registry) as (_, decider):
        asker = Asker()
        decider.ask_again(make_query(), asker, failed=InstanceId("p0"), reason="instance_lost")
        decision = await asker.answer()
        assert decision.prefill is None
        assert "again without p0 (instance_lost)" in decision.reason


@pytest.mark.asyncio
async def test_a_refusal_arrives_with_all_that_it_says(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with led(registry) as (leader, decider):
        full = CapacityError(
            "full", stage="route", retry_after_ms=7_000, reason="why", predicted_ms=2, limit_ms=1
        )
        monkeypatch.setattr(leader.router, "submit", lambda _: Rejected(full))
        asker = Asker()
        decider.ask(make_query(), asker, may_wait=True)
        await asyncio.wait_for(asker.heard.wait(), 20)
        assert isinstance(asker.error, CapacityError)
        error = asker.error
        assert (error.reason, error.predicted_ms, error.limit_ms) == ("why", 2, 1)
        assert error.retry_after_ms == 7_000


@pytest.mark.asyncio
async def test_without_a_router_the_gateway_decides_and_says_so(registry: MemoryRegistry) -> None:
    async with remote_decider(registry) as decider:
        before, asker = fallbacks(), Asker()
        decider.ask(make_query(), asker, may_wait=True)
        decision = await asker.answer()
        assert decision.policy == OWN_POLICY
        assert fallbacks() == before + 1
        assert decider._own.snapshot().num_reservations == 1
        decider.report(decision.decision_id, Outcome.finished())
        assert decider._own.snapshot().num_reservations == 0


@pytest.mark.asyncio
async def test_a_gateway_that_knows_nobody_either_refuses(registry: MemoryRegistry) -> None:
    async with remote_decider(registry) as decider:
        decider._own.state.stream_broken(InstanceId("d0"), 1, "test")
        asker = Asker()
        decider.ask(make_query(), asker, may_wait=True)
        assert isinstance(asker.error, NoInstanceError)


@pytest.mark.asyncio
async def test_a_question_that_waits_in_a_router_that_dies_is_decided_all_the_same(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with led(registry) as (leader, decider):
        held = hold_everything(leader, monkeypatch)
        asker = Asker()
        decider.ask(make_query(), asker, may_wait=True)
        await poll_until(lambda: len(held) == 1)
        assert not asker.heard.is_set()
        await leader.die()
        assert (await asker.answer()).policy == OWN_POLICY


class Hung:
    """A router whose calls of ``name`` are not answered while ``is_hung`` is."""

    def __init__(
        self, router: HostedRouter, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.num_asked = dict.fromkeys(names, 0)
        self.recovers = asyncio.Event()
        servicer = router.host._servicer
        for name in names:
            monkeypatch.setattr(servicer, name, self._hanging(name, getattr(servicer, name)))

    def _hanging(
        self, name: str, answer: Callable[[Any, Any], Awaitable[Any]]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def hang(request: Any, context: Any) -> Any:
            self.num_asked[name] += 1
            await self.recovers.wait()
            return await answer(request, context)

        return hang


@pytest.mark.asyncio
async def test_nobody_waits_for_a_leader_that_hangs_and_it_is_asked_again_when_it_lives(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    leader = HostedRouter(registry, "router-0")
    hung = Hung(leader, ("Route", "Beat"), monkeypatch)  # before its server takes its methods
    await leader.start()
    await leader.leads()
    async with remote_decider(registry) as decider:
        monkeypatch.setattr(pulse, "SILENCE_S", 0.1)
        await poll_until(lambda: decider.leader == leader.record)
        first, second = Asker(), Asker()
        decider.ask(make_query(name="a-0.0"), first, may_wait=True)
        assert (await first.answer()).policy == OWN_POLICY
        assert hung.num_asked["Route"] == 1
        decider.ask(make_query(name="b-0.0"), second, may_wait=True)
        assert second.heard.is_set(), "who knows that it hangs does not ask it"
        assert hung.num_asked["Route"] == 1
        hung.recovers.set()
        link = decider._link
        assert link is not None
        await poll_until(lambda: not link.is_silent, timeout_s=60)
        monkeypatch.setattr(pulse, "SILENCE_S", PATIENCE_S)
        third = Asker()
        decider.ask(make_query(name="c-0.0"), third, may_wait=True)
        assert (await third.answer()).policy == leader.router.snapshot().policy
        assert leader.router.snapshot().num_reservations == 1, "what was not answered is not booked"
    await leader.host.close()


@pytest.mark.asyncio
async def test_one_whose_callback_raises_keeps_no_answer_from_others_of_a_silent_leader(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(decision: RouteDecision) -> None:
        raise ValueError(f"not foreseen: {decision.decision_id}")

    async with led(registry) as (leader, decider):
        held = hold_everything(leader, monkeypatch)
        broken, other = Asker(), Asker()
        monkeypatch.setattr(broken, "on_routed", raises)
        decider.ask(make_query(name="a-0.0"), broken, may_wait=True)
        decider.ask(make_query(name="b-0.0"), other, may_wait=True)
        await poll_until(lambda: len(held) == 2, timeout_s=20)
        assert decider._link is not None
        decider._on_silence(decider._link)
        assert (await other.answer()).policy == OWN_POLICY
        await poll_until(lambda: leader.host.driver.num_waiting == 0, timeout_s=20)


@pytest.mark.asyncio
async def test_a_leader_that_makes_a_question_wait_is_not_taken_for_a_hung_one(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    leader = HostedRouter(registry, "router-0")
    beats = Hung(leader, ("Beat",), monkeypatch)
    beats.recovers.set()
    await leader.start()
    await leader.leads()
    async with remote_decider(registry) as decider:
        await poll_until(lambda: decider.leader == leader.record)
        held = hold_everything(leader, monkeypatch)
        asker, query = Asker(), make_query(name="long-0.0")
        decider.ask(query, asker, may_wait=True)
        await poll_until(lambda: len(held) == 1 and beats.num_asked["Beat"] > 3, timeout_s=60)
        assert not asker.heard.is_set()
        assert decider._link is not None
        assert not decider._link.is_silent
        decider.withdraw(query.request_id)
        await poll_until(lambda: leader.host.driver.num_waiting == 0, timeout_s=20)
    await leader.host.close()


@pytest.mark.asyncio
async def test_a_watch_for_who_leads_that_breaks_is_begun_anew(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, broken = registry.list_and_watch, asyncio.Event()

    async def break_once(prefix: str) -> Listing:
        if not broken.is_set():
            broken.set()
            raise ValueError("not foreseen")
        return await listed(prefix)

    monkeypatch.setattr(registry, "list_and_watch", break_once)
    async with remote_decider(registry) as decider:
        await asyncio.wait_for(broken.wait(), 20)
        leader = await HostedRouter(registry, "router-0").start()
        await poll_until(lambda: decider.leader == leader.record, timeout_s=60)
        await leader.host.close()


@pytest.mark.asyncio
async def test_a_watch_begun_anew_finds_out_that_the_leader_has_gone(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tells it what went while it was not there."""
    listed, gone = registry.list_and_watch, asyncio.Event()

    async def listed_later(prefix: str) -> Listing:
        await gone.wait()
        return await listed(prefix)

    async with led(registry) as (leader, decider):
        monkeypatch.setattr(registry, "list_and_watch", listed_later)
        broken = asyncio.Event()

        def on_leader(_: object) -> None:
            broken.set()
            raise ValueError("not foreseen")

        with monkeypatch.context() as breaks:
            breaks.setattr(decider, "_on_leader", on_leader)
            await leader.die()
            await asyncio.wait_for(broken.wait(), 60)
        assert decider.leader == leader.record, "what the event said was lost with it"
        gone.set()
        await poll_until(lambda: decider.leader is None, timeout_s=60)
        asker = Asker()
        decider.ask(make_query(), asker, may_wait=True)
        assert (await asker.answer()).policy == OWN_POLICY


@pytest.mark.asyncio
async def test_a_standby_takes_over_with_the_questions_that_wait(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one only stops leading: hung, or cut off from the registry."""
    first = await HostedRouter(registry, "router-0").start()
    await first.leads()
    second = await HostedRouter(registry, "router-1").start()
    held = hold_everything(first, monkeypatch)
    async with remote_decider(registry) as decider:
        await poll_until(lambda: decider.leader == first.record)
        asker = Asker()
        decider.ask(make_query(), asker, may_wait=True)
        await poll_until(lambda: len(held) == 1)
        assert first.host._campaign is not None
        first.host._campaign.cancel()
        decision = await asker.answer()
        assert second.host.is_leading
        assert decision.policy == second.router.snapshot().policy
        assert decider.leader == second.record
        assert second.router.log.get(decision.decision_id) is not None
    await second.host.close()
    await first.host.close()


@pytest.mark.asyncio
async def test_two_seconds_after_a_leader_died_gateways_ask_the_standby() -> None:
    """On the registry's clock: what else it takes are events, one after the other."""
    clock = VirtualClock(1)
    registry = MemoryRegistry(clock)  # nothing expires but by the hand of this test
    first = await HostedRouter(registry, "router-0").start()
    await first.leads()
    second = await HostedRouter(registry, "router-1").start()
    async with remote_decider(registry) as decider:
        await poll_until(lambda: decider.leader == first.record)
        await first.die()
        candidate = second.host._candidate
        assert candidate is not None

        def is_renewed() -> bool:
            lease = registry._leases[candidate._lease._lease_id]
            return lease.expires_ns == clock.monotonic_ns() + lease.ttl_ns

        for step_ms in (0.9 * election.LEASE_MS, 0.1 * election.LEASE_MS + EXPIRY_PERIOD_MS):
            await poll_until(is_renewed, timeout_s=60)
            assert decider.leader == first.record, "its lease has not ended"
            clock.advance_ms(step_ms)
            registry.expire_leases()
        await poll_until(lambda: decider.leader == second.record, timeout_s=60)
        assert clock.monotonic_ns() <= 2_000 * NS_PER_MS
    registry.close()
    await second.host.close()


@pytest.mark.asyncio
async def test_one_that_does_not_lead_refuses_and_the_gateway_decides(
    registry: MemoryRegistry,
) -> None:
    async with led(registry) as (leader, decider):
        leader.host._leads.clear()
        asker = Asker()
        decider.ask(make_query(), asker, may_wait=True)
        assert (await asker.answer()).policy == OWN_POLICY


@pytest.mark.asyncio
async def test_one_that_has_not_heard_yet_that_it_leads_answers_when_it_has(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with led(registry) as (leader, decider):
        monkeypatch.setattr(service, "LEAD_GRACE_S", 30.0)
        leads = leader.host._servicer._leads = Awaited()
        assert decider._link is not None
        asking = asyncio.create_task(
            decider._link.route(query_to_pb(make_query(), may_wait=True, gateway_id="g"), 20)
        )
        await asyncio.wait_for(leads.is_awaited.wait(), 20)
        leads.set()
        assert (await asking).policy == leader.router.snapshot().policy


@pytest.mark.asyncio
async def test_a_client_that_leaves_takes_its_question_out_of_the_router(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with led(registry) as (leader, decider):
        held = hold_everything(leader, monkeypatch)
        asker, query = Asker(), make_query(name="gone-0.0")
        decider.ask(query, asker, may_wait=True)
        await poll_until(lambda: len(held) == 1 and leader.host.driver.num_waiting == 1)
        decider.withdraw(query.request_id)
        await poll_until(lambda: leader.host.driver.num_waiting == 0)
        assert not asker.heard.is_set()


@pytest.mark.asyncio
async def test_a_decision_on_its_way_to_one_that_has_left_is_given_back(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with led(registry) as (leader, decider):
        asker, query = Asker(), make_query(name="gone-0.0")
        decider.ask(query, asker, may_wait=True)
        await poll_until(lambda: leader.router.snapshot().num_reservations == 1)
        decider.withdraw(query.request_id)
        if asker.decision is not None:  # it was heard in time: then its asker reports
            decider.report(asker.decision.decision_id, Outcome.cancelled())
        await poll_until(lambda: leader.router.snapshot().num_reservations == 0)


def lose_answers(decider: RemoteDecider, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router decides, and what arrives of it is ``error``."""
    link = decider._link
    assert link is not None
    route = link.route

    async def lose(request: pb.RouteRequest, timeout_s: float) -> RouteDecision:
        await route(request, timeout_s)
        raise error

    monkeypatch.setattr(link, "route", lose)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [DeadlineError, InstanceLostError])
async def test_a_decision_whose_answer_was_lost_is_given_back(
    registry: MemoryRegistry, kind: type[IsthmusError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with led(registry) as (leader, decider):
        lose_answers(decider, kind("lost", stage="route"), monkeypatch)
        asker = Asker()
        decider.ask(make_query(name="lost-0.0"), asker, may_wait=True)
        assert (await asker.answer()).policy == OWN_POLICY
        assert len(leader.router.log.of_request("lost-0.0")) == 1
        await poll_until(lambda: leader.router.snapshot().num_reservations == 0, timeout_s=20)
        assert not leader.host._servicer.open._gateways["g"].open


@pytest.mark.asyncio
async def test_an_answer_that_cannot_be_read_is_an_answer_all_the_same(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with led(registry) as (leader, decider):
        lose_answers(decider, KeyError("no such policy"), monkeypatch)
        asker = Asker()
        decider.ask(make_query(name="odd-0.0"), asker, may_wait=True)
        await asyncio.wait_for(asker.heard.wait(), 20)
        assert isinstance(asker.error, InternalError)
        await poll_until(lambda: leader.router.snapshot().num_reservations == 0, timeout_s=20)


@pytest.mark.asyncio
async def test_a_candidacy_that_breaks_is_begun_anew(
    registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign, broken = Candidate._campaign, asyncio.Event()

    async def break_once(candidate: Candidate) -> None:
        if broken.is_set():
            await campaign(candidate)
        broken.set()
        raise ValueError("not foreseen")

    monkeypatch.setattr(Candidate, "_campaign", break_once)
    router = await HostedRouter(registry, "router-0").start()
    await router.leads()
    assert broken.is_set()
    await router.host.close()


@pytest.mark.asyncio
async def test_every_router_explains_what_it_decided(registry: MemoryRegistry) -> None:
    first = await HostedRouter(registry, "router-0").start()
    await first.leads()
    second = await HostedRouter(registry, "router-1").start()
    first.router.route(make_query(name="abc-0.0"))
    second.router.route(make_query(name="abc-0.1"))
    await poll_until(lambda: len(registry._list("/isthmus/isthmus/routers/")) == 2, timeout_s=20)
    routers = await find_deciders(registry, "isthmus")
    assert {router.router_id for router in routers} == {"router-0", "router-1"}
    records = await explain(routers, "abc")
    assert {record.request_id for record in records} == {"abc-0.0", "abc-0.1"}
    await second.die()
    assert [record.request_id for record in await explain(routers, "abc")] == ["abc-0.0"]
    await second.host.close()
    await first.host.close()


@pytest.mark.asyncio
async def test_a_gateway_explains_what_it_decided_by_itself(registry: MemoryRegistry) -> None:
    async with remote_decider(registry) as decider:
        host = ExplainHost(decider._own, registry, ClusterConfig(), "gateway-0")
        await host.start()
        asker = Asker()
        decider.ask(make_query(name="alone-0.0"), asker, may_wait=True)
        decision = await asker.answer()
        decider.report(decision.decision_id, Outcome.finished(5.0))
        prefix = deciders_prefix("isthmus")
        await poll_until(lambda: len(registry._list(prefix)) == 1, timeout_s=20)
        [record] = await explain(await find_deciders(registry, "isthmus"), "alone")
        assert record.decision is not None
        assert record.decision.policy.startswith("least_loaded")
        assert record.outcomes == [OutcomeKind.FINISHED]
        await host.close()
        assert not registry._list(prefix)


@pytest.mark.asyncio
async def test_who_is_forgotten_by_the_registry_shows_itself_again(
    registry: MemoryRegistry,
) -> None:
    presence = Presence(registry, "/here", b"me", lease_ms=300)
    presence.start()
    await poll_until(lambda: len(registry._list("/here")) == 1, timeout_s=20)
    await registry.revoke_lease(await presence._lease.held())
    assert not registry._list("/here")
    await poll_until(lambda: len(registry._list("/here")) == 1, timeout_s=20)
    await presence.close()
    assert not registry._list("/here")
