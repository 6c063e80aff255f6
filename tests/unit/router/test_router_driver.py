"""Who waits in a router is told once, in time, and costs nothing when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from isthmus.common.clock import NS_PER_MS, SystemClock
from isthmus.common.errors import IsthmusError, SloShedError
from isthmus.common.ids import DecisionId, RequestId
from isthmus.common.types import RouteAction, RouteDecision
from isthmus.router import Admitted, Held, Outcome, Rejected, RouteQuery, Settled
from isthmus.router.driver import RouterDriver
from tests.support.poll import poll_until
from tests.support.router_cluster import make_query


def decision(name: str) -> RouteDecision:
    return RouteDecision(DecisionId(f"d-{name}"), RequestId(name), RouteAction.ADMIT, None, None)


class HoldingRouter:
    """Holds everything; ``settle`` says what the next tick tells."""

    def __init__(self) -> None:
        self.on_progress: Callable[[], None] | None = None
        self.held: list[RequestId] = []
        self.cancelled: list[RequestId] = []
        self.reported: list[tuple[DecisionId, Outcome]] = []
        self.due_ns: int | None = None
        self.num_ticks = 0
        self.is_broken = False
        self._settled: list[Settled] = []

    def submit(self, query: RouteQuery) -> Admitted | Held | Rejected:
        self.held.append(query.request_id)
        return Held(query.request_id, None)

    def tick(self) -> list[Settled]:
        self.num_ticks += 1
        self.due_ns = None
        if self.is_broken:
            self.is_broken, self.due_ns = False, 0
            raise ValueError("broken")
        settled, self._settled = self._settled, []
        return settled

    def next_tick_ns(self) -> int | None:
        return self.due_ns

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)

    def report(self, decision_id: DecisionId, outcome: Outcome) -> None:
        self.reported.append((decision_id, outcome))

    def settle(self, name: str, error: IsthmusError | None = None) -> None:
        verdict = Admitted(decision(name)) if error is None else Rejected(error)
        self._settled.append(Settled(RequestId(name), verdict))
        if self.on_progress is not None:
            self.on_progress()


@pytest.fixture
def router() -> HoldingRouter:
    return HoldingRouter()


def driver_of(router: HoldingRouter) -> RouterDriver:
    return RouterDriver(router, SystemClock())  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_each_hears_its_own_end_of_the_wait(router: HoldingRouter) -> None:
    driver = driver_of(router)
    waits = [asyncio.create_task(driver.decide(make_query(name=name))) for name in ("a", "b")]
    await poll_until(lambda: driver.num_waiting == 2)
    router.settle("b", SloShedError("too much", stage="route"))
    router.settle("a")
    assert (await waits[0]).decision_id == "d-a"
    with pytest.raises(SloShedError):
        await waits[1]
    assert router.num_ticks == 1  # one for all the news of one turn
    assert driver.num_waiting == 0
    driver.close()


@pytest.mark.asyncio
async def test_a_tick_that_is_due_comes_without_news(router: HoldingRouter) -> None:
    driver = driver_of(router)
    router.due_ns = SystemClock().monotonic_ns() + 5 * NS_PER_MS
    wait = asyncio.create_task(driver.decide(make_query(name="a")))
    await poll_until(lambda: router.num_ticks == 1)
    assert not wait.done()
    router.settle("a")
    assert (await wait).request_id == "a"
    driver.close()


@pytest.mark.asyncio
async def test_nobody_waits_nothing_ticks(router: HoldingRouter) -> None:
    driver = driver_of(router)
    router.settle("nobody")
    await asyncio.sleep(0)
    assert router.num_ticks == 0
    driver.close()


@pytest.mark.asyncio
async def test_one_that_leaves_is_taken_out_and_hears_nothing(router: HoldingRouter) -> None:
    driver = driver_of(router)
    wait = asyncio.create_task(driver.decide(make_query(name="a")))
    await poll_until(lambda: driver.num_waiting == 1)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert router.cancelled == ["a"]
    assert driver.num_waiting == 0
    driver.close()


@pytest.mark.asyncio
async def test_a_decision_that_meets_its_askers_end_is_given_back(router: HoldingRouter) -> None:
    """Answered and cancelled in one turn of the loop: nobody would report its outcome."""
    driver = driver_of(router)
    wait = asyncio.create_task(driver.decide(make_query(name="a")))
    await poll_until(lambda: driver.num_waiting == 1)
    router.settle("a")
    driver._tick()
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert router.reported == [("d-a", Outcome.cancelled())]
    driver.close()


@pytest.mark.asyncio
async def test_one_that_leaves_as_the_tick_comes_takes_nothing_from_the_others(
    router: HoldingRouter,
) -> None:
    """Its wait is cancelled at once, before its task has run and taken it out."""
    driver = driver_of(router)
    waits = [asyncio.create_task(driver.decide(make_query(name=name))) for name in ("a", "b")]
    await poll_until(lambda: driver.num_waiting == 2)
    router.settle("a")
    router.settle("b")
    waits[0].cancel()
    assert (await asyncio.wait_for(waits[1], 20)).decision_id == "d-b"
    with pytest.raises(asyncio.CancelledError):
        await waits[0]
    assert router.reported == [("d-a", Outcome.cancelled())]
    driver.close()


@pytest.mark.asyncio
async def test_a_decision_that_is_told_after_its_asker_left_is_given_back(
    router: HoldingRouter,
) -> None:
    """It was made by a tick that broke off, so there was nothing left to cancel."""
    driver = driver_of(router)
    waits = [asyncio.create_task(driver.decide(make_query(name=name))) for name in ("a", "b")]
    await poll_until(lambda: driver.num_waiting == 2)
    waits[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits[0]
    router.settle("a")
    router.settle("b")
    assert (await asyncio.wait_for(waits[1], 20)).decision_id == "d-b"
    assert router.reported == [("d-a", Outcome.cancelled())]
    driver.close()


@pytest.mark.asyncio
async def test_a_callback_that_raises_leaves_the_others_their_verdicts(
    router: HoldingRouter,
) -> None:
    driver = driver_of(router)

    def broken(_: Admitted | Rejected) -> None:
        raise ValueError("cannot take it in")

    driver.submit(make_query(name="a"), broken)
    wait = asyncio.create_task(driver.decide(make_query(name="b")))
    await poll_until(lambda: driver.num_waiting == 2)
    router.settle("a")
    router.settle("b")
    assert (await asyncio.wait_for(wait, 20)).decision_id == "d-b"
    driver.close()


@pytest.mark.asyncio
async def test_a_tick_that_breaks_off_is_made_again(router: HoldingRouter) -> None:
    driver = driver_of(router)
    wait = asyncio.create_task(driver.decide(make_query(name="a")))
    await poll_until(lambda: driver.num_waiting == 1)
    router.is_broken = True
    router.settle("a")
    assert (await asyncio.wait_for(wait, 20)).decision_id == "d-a"
    assert router.num_ticks == 2
    driver.close()
