"""The router of another process, of which one leads, and what is done without one.

::

    ask ──▶ leader known ──▶ Route ──▶ decision or refusal ─────────────────▶ asker
                │              │ out of reach, silent, or leads no more
                │              ├─ another leads by now ──▶ asked again there
                ▼              ▼
             nobody leads: this gateway's own view, least loaded first ──────▶ asker

So no request is lost with a router, nor waits for one that is hung: it is decided elsewhere or
here. Decisions made here say so in their ``policy``, in a metric and in the log. Outcomes go to the
leader, whoever decided, and to this gateway's own view, which learns from them whom to avoid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from isthmus.common import metrics
from isthmus.common.backoff import Backoff
from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.errors import (
    DeadlineError,
    InstanceLostError,
    InternalError,
    IsthmusError,
    StaleEpochError,
)
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.logging import RateLimitedLog, get_logger
from isthmus.common.registry import Registry, leader_key, resume_watch
from isthmus.common.registry.routers import ROUTER, RouterRecord
from isthmus.common.tasks import end_task, tell_if_broken
from isthmus.common.types import RouteDecision
from isthmus.gateway.decider import Asker
from isthmus.gateway.router_link import RouterLink
from isthmus.protos.v1 import router_pb2 as pb
from isthmus.router.router import Router
from isthmus.router.types import Outcome, RouteQuery
from isthmus.router.wire import outcome_to_pb, query_to_pb

FALLBACK_PREFIX = "fallback_"
FOLLOW_CAP_S = 1.0
ANSWER_S = 2.0
"""For a question that may not wait in the router; beyond its deadline for one that may."""
_log = get_logger("remote_router")
_LOST: dict[type[IsthmusError], str] = {
    InstanceLostError: "out_of_reach",
    StaleEpochError: "not_leading",
    DeadlineError: "no_answer",
}
_MAYBE_DECIDED = frozenset({"out_of_reach", "no_answer"})
"""The answer may have been lost on its way, and with it a decision that nobody would report."""


@dataclass(eq=False, slots=True)
class _Question:
    query: RouteQuery
    asker: Asker
    put: Callable[[RouterLink], Awaitable[RouteDecision]]
    task: asyncio.Task[None] | None = None

    def take_back(self) -> None:
        """Its answer is not waited for any more."""
        if self.task is not None:
            self.task.cancel()


class RemoteDecider:
    """Implements ``Decider``. ``own``: a router over this gateway's view, for want of another.

    ``start`` and ``close`` in the event loop that asks. A question is in ``_questions`` from
    ``ask`` until its asker has heard, and its task belongs to it.
    """

    def __init__(
        self, registry: Registry, cluster: str, gateway_id: str, own: Router, clock: Clock
    ) -> None:
        self._registry = registry
        self._key = leader_key(cluster, ROUTER)
        self._gateway_id = gateway_id
        self._own = own
        self._clock = clock
        self._link: RouterLink | None = None
        self._is_led = False
        self._questions: dict[RequestId, _Question] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None
        self._warnings = RateLimitedLog(_log)

    def start(self) -> None:
        self._follower = asyncio.get_running_loop().create_task(
            self._follow(), name="follow-router"
        )
        self._follower.add_done_callback(tell_if_broken(_log, "no leader is followed any more"))

    async def close(self) -> None:
        await end_task(self._follower)
        asking = [item.task for item in self._questions.values() if item.task is not None]
        self._questions.clear()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        if self._link is not None:
            self._close_later(self._link)
        await asyncio.gather(*self._closing, return_exceptions=True)

    @property
    def leader(self) -> RouterRecord | None:
        """Who is asked now; None = this gateway decides by itself."""
        return self._link.record if self._link is not None and self._is_led else None

    # --- Decider --------------------------------------------------------------------------------
    def ask(self, query: RouteQuery, asker: Asker, *, may_wait: bool) -> None:
        request = query_to_pb(query, may_wait=may_wait, gateway_id=self._gateway_id)
        timeout_s = ANSWER_S
        if may_wait and query.deadline_ns:
            timeout_s += max(0, query.deadline_ns - self._clock.now_ns()) / NS_PER_S
        self._put(_Question(query, asker, lambda link: link.route(request, timeout_s)))

    def ask_again(
        self, query: RouteQuery, asker: Asker, *, failed: InstanceId, reason: str
    ) -> None:
        request = pb.RerouteRequest(
            failed_instance=failed,
            reason=reason,
            request=query_to_pb(query, may_wait=False, gateway_id=self._gateway_id),
        )
        without = replace(query, exclude=query.exclude | {failed})
        self._put(_Question(without, asker, lambda link: link.reroute(request, ANSWER_S)))

    def withdraw(self, request_id: RequestId) -> None:
        question = self._questions.pop(request_id, None)
        if question is not None:
            question.take_back()
            self._tell(pb.ReportOutcomeRequest(withdrawn_request_id=request_id))

    def report(self, decision_id: DecisionId, outcome: Outcome) -> None:
        self._own.report(decision_id, outcome)
        self._tell(outcome_to_pb(decision_id, outcome))

    # --- inside ---------------------------------------------------------------------------------
    def _put(self, question: _Question) -> None:
        link = self._link
        if link is None or not self._is_led:
            self._decide_here(question, "no_leader")
            return
        if link.is_silent:
            self._decide_here(question, "no_answer")
            return
        self._questions[question.query.request_id] = question
        question.task = asyncio.get_running_loop().create_task(self._hear(question, link))
        question.task.add_done_callback(tell_if_broken(_log, "a decision could not be taken in"))

    async def _hear(self, question: _Question, link: RouterLink) -> None:
        try:
            decision = await question.put(link)
        except IsthmusError as error:
            self._questions.pop(question.query.request_id, None)
            why = _LOST.get(type(error))
            if why in _MAYBE_DECIDED:
                link.tell(pb.ReportOutcomeRequest(withdrawn_request_id=question.query.request_id))
            if why is None:
                question.asker.on_refused(error)
            elif self._link is not link and self._is_led:
                self._put(question)
            else:
                self._decide_here(question, why)
        except Exception as error:  # noqa: BLE001  # its asker waits for an answer
            _log.exception("a question could not be put", request_id=question.query.request_id)
            self._questions.pop(question.query.request_id, None)
            link.tell(pb.ReportOutcomeRequest(withdrawn_request_id=question.query.request_id))
            text = f"the router's answer could not be read: {error}"
            question.asker.on_refused(InternalError(text, stage="route"))
        else:
            self._questions.pop(question.query.request_id, None)
            question.asker.on_routed(decision)

    def _decide_here(self, question: _Question, why: str) -> None:
        metrics.ROUTER_FALLBACK.labels(reason=why).inc()
        self._warnings.warning(why, "no router: this gateway decides by itself", why=why)
        try:
            decision = self._own.route(question.query)
        except IsthmusError as error:
            question.asker.on_refused(error)
        else:
            policy = f"{FALLBACK_PREFIX}{decision.policy}"
            question.asker.on_routed(replace(decision, policy=policy))

    def _tell(self, message: pb.ReportOutcomeRequest) -> None:
        if self._link is not None:
            self._link.tell(message)

    async def _follow(self) -> None:
        """Whatever breaks it, it is begun anew: a gateway that heard of no other leader would ask
        the one it knows for ever."""
        backoff = Backoff(cap_s=FOLLOW_CAP_S)
        while True:
            try:
                await self._follow_leader()
            except Exception:  # noqa: BLE001  # whatever broke it
                _log.exception("the watch for who leads broke")
            await asyncio.sleep(backoff.next_s())

    async def _follow_leader(self) -> None:
        is_told = False

        def on_listed(is_connected: bool) -> None:
            """A watch that is begun anew cannot tell that who led before it has gone."""
            if is_connected and self._is_led and not is_told:
                self._on_leader(None)

        watch = resume_watch(self._registry, self._key, on_connected=on_listed)
        try:
            async for event in watch:
                if event.key == self._key:
                    is_told = True
                    self._on_leader(RouterRecord.decode(event.entry.value) if event.entry else None)
        finally:
            await watch.aclose()

    def _on_leader(self, record: RouterRecord | None) -> None:
        """Who leads no more may still answer what it was asked; only another one replaces it."""
        self._is_led = record is not None
        if record is None:
            _log.warning("no router leads")
        if record is None or (self._link is not None and self._link.record == record):
            return
        _log.info("router leads", router=record.router_id, address=record.address)
        old, self._link = self._link, RouterLink(record, self._gateway_id, self._on_silence)
        if old is None:
            return
        for question in self._take_questions():
            self._put(question)
        self._close_later(old)

    def _on_silence(self, link: RouterLink) -> None:
        """The router that is asked gives no sign of life: those who wait for it are decided here,
        and so is everybody until it gives one, or another leads."""
        if link is not self._link:
            return
        _log.warning("the router that leads does not answer", router=link.record.router_id)
        for question in self._take_questions():
            self._tell(pb.ReportOutcomeRequest(withdrawn_request_id=question.query.request_id))
            try:
                self._decide_here(question, "no_answer")
            except Exception:  # noqa: BLE001  # the others wait as well
                _log.exception("a decision could not be taken in")

    def _take_questions(self) -> list[_Question]:
        taken, self._questions = list(self._questions.values()), {}
        for question in taken:
            question.take_back()
        return taken

    def _close_later(self, link: RouterLink) -> None:
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.add_done_callback(tell_if_broken(_log, "a link to a router could not be closed"))
