"""Runs a router on an event loop: calls its ticks when they are due, and tells those who wait.

The router itself never waits and has no timer. Whoever embeds it for live requests (a gateway, a
router process) has one driver for it; a simulator calls the ticks from its own clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.ids import RequestId
from isthmus.common.logging import get_logger
from isthmus.common.types import RouteDecision
from isthmus.router.router import Router
from isthmus.router.types import Outcome, RouteQuery
from isthmus.router.verdict import Admitted, Held, Rejected, Settled

OnSettled = Callable[[Admitted | Rejected], None]
_log = get_logger("router")


class RouterDriver:
    """Owns the timer and who waits. Everything runs in the event loop. A callback or a tick that
    raises is logged and harms nobody else who waits."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._waiting: dict[RequestId, OnSettled] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0  # when it rings
        self._is_woken = False
        router.on_progress = self._wake

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, query: RouteQuery, on_settled: OnSettled) -> None:
        """``on_settled`` is called once, possibly before this returns, unless ``cancel`` is."""
        verdict = self._router.submit(query)
        if isinstance(verdict, Held):
            self._waiting[query.request_id] = on_settled
            self._arm()
        else:
            on_settled(verdict)

    def cancel(self, request_id: RequestId) -> None:
        """A no-op for one that does not wait."""
        if self._waiting.pop(request_id, None) is not None:
            self._router.cancel(request_id)

    async def decide(self, query: RouteQuery) -> RouteDecision:
        """Waits as long as the router lets it. Raises what the router rejects it with."""
        settled: asyncio.Future[Admitted | Rejected] = asyncio.get_running_loop().create_future()

        def hear(verdict: Admitted | Rejected) -> None:
            # Whoever cancels a task cancels what it waits for at once, before the task has run.
            if settled.done():
                self._give_back(verdict)
            else:
                settled.set_result(verdict)

        self.submit(query, hear)
        try:
            verdict = await settled
        except asyncio.CancelledError:
            self.cancel(query.request_id)
            if settled.done() and not settled.cancelled():
                self._give_back(settled.result())
            raise
        if isinstance(verdict, Rejected):
            raise verdict.error
        return verdict.decision

    def close(self) -> None:
        """Nobody is told anything more."""
        self._router.on_progress = None
        self._waiting.clear()
        self._disarm()

    # --- inside ---------------------------------------------------------------------------------
    def _wake(self) -> None:
        """News came: one tick for all that comes in this turn of the loop."""
        if self._waiting and not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._is_woken = False
        self._disarm()
        try:
            told = self._router.tick()
        except Exception:  # noqa: BLE001  # the next tick tells who was settled in this one
            _log.exception("a tick of the router broke off")
            told = []
        for settled in told:
            on_settled = self._waiting.pop(settled.request_id, None)
            if on_settled is not None:
                _tell(on_settled, settled)
            else:  # it left after a tick that broke off had settled it
                self._give_back(settled.verdict)
        self._arm()

    def _give_back(self, verdict: Admitted | Rejected) -> None:
        """Nobody is left who would report the outcome."""
        if isinstance(verdict, Admitted):
            self._router.report(verdict.decision.decision_id, Outcome.cancelled())

    def _arm(self) -> None:
        due_ns = self._router.next_tick_ns() if self._waiting else None
        if self._timer is not None and due_ns == self._due_ns:
            return  # as mostly when one more waits
        self._disarm()
        if due_ns is not None:
            self._due_ns = due_ns
            delay_s = max(0, due_ns - self._clock.monotonic_ns()) / NS_PER_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _tell(on_settled: OnSettled, settled: Settled) -> None:
    try:
        on_settled(settled.verdict)
    except Exception:  # noqa: BLE001  # the others' verdicts are told once, and now
        _log.exception("a verdict could not be taken in", request_id=settled.request_id)
