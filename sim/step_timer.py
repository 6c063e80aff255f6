"""What a simulated instance runs now: one step, or a leap over many that only decode.

::

    steps      steps               steps + num_steps
                 ├──┬──┬──┬──┬──┬──┤
    now          └ done ┘^ in progress: found when someone asks (``begun``)

A leap's end is planned once; somebody who comes or goes brings it forward to the end of the step in
progress (``cut_short``). Owns the event of the end.
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus.common.clock import NS_PER_MS
from isthmus.sim.events import EventQueue
from isthmus.sim.step_model import Leap


class StepTimer:
    """``on_end`` is called once for each ``start``, unless ``stop`` is before: at the end of the
    last step, which runs until whoever is called stops it."""

    def __init__(self, queue: EventQueue, on_end: Callable[[], None]) -> None:
        self.is_running = False
        self.num_steps = 0
        self.busy_ns = 0
        self.started_ns = 0
        self.ends_ns = 0
        self.leap: Leap | None = None
        self._queue = queue
        self._on_end = on_end
        self._plan_no = 0

    @property
    def is_leaping(self) -> bool:
        return self.is_running and self.leap is not None

    @property
    def took_ms(self) -> float:
        return (self.ends_ns - self.started_ns) / NS_PER_MS

    def start(self, total_ms: float, num_steps: int = 1, leap: Leap | None = None) -> None:
        now_ns = self._queue.now_ns
        self.is_running = True
        self.started_ns = now_ns
        self.num_steps, self.leap = num_steps, leap
        self._ends_at(now_ns + max(1, round(total_ms * NS_PER_MS)))
        self.busy_ns += self.ends_ns - now_ns

    def begun(self, by_ns: int) -> int:
        """Steps of the leap that have begun by then."""
        assert self.leap is not None
        steps = self.leap.steps_until((by_ns - self.started_ns) / NS_PER_MS)
        return steps if steps < self.num_steps else self.num_steps

    def cut_short(self) -> None:
        """Ends a leap with the step in progress."""
        if not self.is_running or self.leap is None:
            return
        steps = self.begun(self._queue.now_ns)
        if steps < self.num_steps:
            self.num_steps = steps
            old_ns = self.ends_ns
            ends_ns = self.started_ns + round(self.leap.after_ms(steps) * NS_PER_MS)
            self._ends_at(max(self._queue.now_ns, ends_ns))
            self.busy_ns += self.ends_ns - old_ns

    def stop(self) -> None:
        """Nothing runs any more; what would have come after now was not."""
        self._plan_no += 1
        self.is_running = False
        if self.ends_ns > self._queue.now_ns:
            self.busy_ns -= self.ends_ns - self._queue.now_ns

    def _ends_at(self, ends_ns: int) -> None:
        self._plan_no += 1
        self.ends_ns = ends_ns
        self._queue.at(ends_ns, self._ended, self._plan_no)

    def _ended(self, plan_no: int) -> None:
        if plan_no == self._plan_no:
            self._on_end()
