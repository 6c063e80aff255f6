"""One walk through a line of held queries: who was passed over, and when there may be more.

A few that find no place say enough of the rest (``MAX_PASSED_OVER``). Those that only leave room
for heavier classes say nothing of whoever is heavier, or shorter: they do not count, and others
like them are not asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.router.holding import HeldQuery
from isthmus.router.weighed import RESERVED

MAX_PASSED_OVER = 4  # queries that find no place, before the rest of a line is not asked


@dataclass(slots=True)
class BindingRound:
    """``wait_ms``: until somebody who was passed over is to be looked at again."""

    wait_ms: float
    _num_passed_over: int = 0
    _stopped: HeldQuery | None = None  # the last one that leaves room for heavier classes

    @property
    def is_over(self) -> bool:
        return self._num_passed_over >= MAX_PASSED_OVER

    def passed(self, held: HeldQuery, wait_ms: float) -> None:
        """It found no place: its ``obstacle`` says why."""
        self.wait_ms = min(self.wait_ms, wait_ms)
        if held.obstacle == RESERVED:
            self._stopped = held
        else:
            self._num_passed_over += 1

    def stops(self, held: HeldQuery) -> bool:
        """Whether what keeps another one from beginning keeps this one, too."""
        stopped = self._stopped
        if stopped is None or held.query.slo.weight > stopped.query.slo.weight:
            return False
        return held.work_ms >= stopped.work_ms
