"""Where requests wait while nobody can serve them: an instance restarts, a rollout is under way.

Whoever waits is held for ``gateway.instance_wait_ms`` at most and tried again as soon as an
instance can serve. There is no event for that (a breaker half opens by the clock, a stream connects
in its own time), so the room looks every ``TICK_S``, as long as somebody is in it. A wait of 0
closes it: refusals are then told at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Receive

from isthmus.common import metrics
from isthmus.common.backoff import SHORT_WAIT_MS, retry_after_ms
from isthmus.common.clock import NS_PER_MS, NS_PER_S
from isthmus.common.errors import CancelledError, IsthmusError, NoInstanceError

TICK_S = 0.05


@dataclass(eq=False, slots=True)
class Hold:
    """One that waits. It ends by ``retry`` or by ``give_up``."""

    retry: Callable[[], object]
    give_up: Callable[[], object]
    until_s: float


class WaitingRoom:
    """Owns its timer. Callbacks run in the event loop; they may add and cancel holds."""

    def __init__(
        self, can_serve: Callable[[], bool], wait_ms: int, why_nobody: Callable[[], str]
    ) -> None:
        """``why_nobody``: can serve now, as one word."""
        self._why_nobody = why_nobody
        self.wait_s = wait_ms * NS_PER_MS / NS_PER_S
        self._can_serve = can_serve
        self._holds: dict[Hold, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self.wait_s > 0

    def ends_s(self) -> float:
        """When somebody who enters now must leave, by the loop's clock."""
        return asyncio.get_running_loop().time() + self.wait_s

    def is_over(self, until_s: float) -> bool:
        return asyncio.get_running_loop().time() >= until_s

    def hold(
        self, retry: Callable[[], object], give_up: Callable[[], object], until_s: float
    ) -> Hold:
        """Until somebody can serve (``retry``), the time is up (``give_up``) or ``cancel``. Who
        retries in vain may enter again, with the same end."""
        hold = Hold(retry, give_up, until_s)
        self._enter(hold)
        self._arm()
        return hold

    def cancel(self, hold: Hold) -> None:
        """Neither of its callbacks is called any more; a no-op once it has ended."""
        self._leave(hold)

    def refusal(self, cause: IsthmusError | None) -> NoInstanceError:
        """What those hear who waited for nothing."""
        message = f"no decode or mixed instance became ready within {self.wait_s:g} s"
        if cause is not None:
            message = f"{cause.message}; {message}"
        asked_ms = cause.retry_after_ms if cause is not None else 0
        reason = cause.reason if isinstance(cause, NoInstanceError) else self._why_nobody()
        return NoInstanceError(
            message,
            stage="route",
            retry_after_ms=asked_ms or retry_after_ms(SHORT_WAIT_MS),
            reason=reason,
        )

    async def until_served(self, receive: Receive) -> None:
        """Returns once an instance can serve, at once when one can or the room is closed.

        Raises NoInstanceError when none could in time, CancelledError when the client left.
        """
        if not self.is_open or self._can_serve():
            return
        loop = asyncio.get_running_loop()
        served: asyncio.Future[bool] = loop.create_future()
        hold = self.hold(
            lambda: _settle(served, is_served=True),
            lambda: _settle(served, is_served=False),
            self.ends_s(),
        )
        watch = loop.create_task(until_left(receive))
        try:
            with metrics.REQUESTS_INFLIGHT.track_inprogress():
                await asyncio.wait((served, watch), return_when=asyncio.FIRST_COMPLETED)
            if not served.done():
                metrics.CANCELS.labels(stage="route").inc()
                raise CancelledError("the client went away", stage="route")
            if not served.result():
                raise self.refusal(None)
        finally:
            self.cancel(hold)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # --- inside ---------------------------------------------------------------------------------
    def _tick(self) -> None:
        self._timer = None
        try:
            can_serve = self._can_serve()
            now_s = asyncio.get_running_loop().time()
            for hold in list(self._holds):
                if hold in self._holds:  # else another's callback has cancelled it
                    self._look_after(hold, can_serve=can_serve, now_s=now_s)
        finally:
            self._arm()  # whatever one of them raised: the others still wait

    def _look_after(self, hold: Hold, *, can_serve: bool, now_s: float) -> None:
        if can_serve:
            self._leave(hold)
            hold.retry()
        elif now_s >= hold.until_s:
            self._leave(hold)
            hold.give_up()

    def _enter(self, hold: Hold) -> None:
        self._holds[hold] = None
        metrics.REQUESTS_HELD.set(len(self._holds))

    def _leave(self, hold: Hold) -> None:
        self._holds.pop(hold, None)
        metrics.REQUESTS_HELD.set(len(self._holds))

    def _arm(self) -> None:
        if self._holds and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)


def _settle(served: asyncio.Future[bool], *, is_served: bool) -> None:
    if not served.done():
        served.set_result(is_served)


async def until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
