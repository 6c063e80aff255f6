"""Who decides where a request goes: the protocol, and the router within this process.

An answer may take its time: a request can wait in the router until an instance can begin it. So
the answer goes to whoever asked, by callback, in the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.types import RouteDecision
from isthmus.router.driver import RouterDriver
from isthmus.router.router import Router
from isthmus.router.types import Outcome, RouteQuery
from isthmus.router.verdict import Admitted, Rejected


class Asker(Protocol):
    """Hears exactly one of the two for a question, possibly before ``ask`` returns."""

    def on_routed(self, decision: RouteDecision) -> None: ...

    def on_refused(self, error: IsthmusError) -> None: ...


class Decider(Protocol):
    def ask(self, query: RouteQuery, asker: Asker, *, may_wait: bool) -> None:
        """``may_wait`` False: answer at once (a stream that is resumed)."""
        ...

    def ask_again(
        self, query: RouteQuery, asker: Asker, *, failed: InstanceId, reason: str
    ) -> None:
        """After a decision that came to nothing because of ``failed``: answer at once."""
        ...

    def withdraw(self, request_id: RequestId) -> None:
        """The asker hears nothing more; what was booked for it is given back."""
        ...

    def report(self, decision_id: DecisionId, outcome: Outcome) -> None: ...


class EmbeddedDecider:
    """The router of this process; ``driver`` runs its waits."""

    def __init__(self, router: Router, driver: RouterDriver) -> None:
        self._router = router
        self._driver = driver

    def ask(self, query: RouteQuery, asker: Asker, *, may_wait: bool) -> None:
        if not may_wait:
            _answer(lambda: self._router.route(query), asker)
            return

        def on_settled(verdict: Admitted | Rejected) -> None:
            if isinstance(verdict, Rejected):
                asker.on_refused(verdict.error)
            else:
                asker.on_routed(verdict.decision)

        self._driver.submit(query, on_settled)

    def ask_again(
        self, query: RouteQuery, asker: Asker, *, failed: InstanceId, reason: str
    ) -> None:
        _answer(lambda: self._router.reroute(query, failed, reason), asker)

    def withdraw(self, request_id: RequestId) -> None:
        """What waits is forgotten; what was answered was heard before this could be called."""
        self._driver.cancel(request_id)

    def report(self, decision_id: DecisionId, outcome: Outcome) -> None:
        self._router.report(decision_id, outcome)


def _answer(decide: Callable[[], RouteDecision], asker: Asker) -> None:
    try:
        decision = decide()
    except IsthmusError as error:
        asker.on_refused(error)
    else:
        asker.on_routed(decision)
