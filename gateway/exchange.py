"""One HTTP generation request from its plan to its end: all choices, one deadline, one end.

The exchange owns its choices and is told by them what is new; the HTTP side waits on it and takes.
However it ends (finished, failed, client gone, deadline), it ends once: open choices are aborted,
metrics are counted and one log line is written by ``Accounting``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_S
from isthmus.common.errors import CancelledError, DeadlineError, IsthmusError
from isthmus.common.timeline import Event, Timeline
from isthmus.gateway.accounting import Accounting
from isthmus.gateway.choice import Choice, ChoiceServices, ChoiceState
from isthmus.gateway.plan import GenerationPlan


class Exchange:
    """``start`` first; then ``wait`` and ``take_changed`` until ``is_done``; ``close`` always."""

    def __init__(self, plan: GenerationPlan, services: ChoiceServices, timeline: Timeline) -> None:
        self.plan = plan
        self.timeline = timeline
        self.error: IsthmusError | None = None
        self.is_done = False  # every choice has finished
        self.has_flushed = False  # the first content of a stream
        self.choices = [
            Choice(number * plan.num_choices + k, prompt, plan, services, self)
            for number, prompt in enumerate(plan.prompts)
            for k in range(plan.num_choices)
        ]
        self._clock = services.clock
        self._waiter: asyncio.Future[None] | None = None
        self._changed: dict[int, Choice] = {}
        self._num_done = 0
        self._has_begun = False
        self._has_expired = False
        self._on_expiry: Callable[[], object] | None = None
        self._accounting: Accounting | None = Accounting(self, services.clock, services.goodput)
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.call_later(self.seconds_left(), self._expire)

    # --- driven by the HTTP side ----------------------------------------------------------------
    def start(self) -> None:
        """Sends the first choice of every prompt; the others follow when its prompt is computed.

        Raises what ended the request before it began.
        """
        if self.error is not None:
            raise self.error
        self._has_begun = True
        for choice in self.choices[:: self.plan.num_choices]:
            if self.error is None:
                choice.submit()

    @property
    def has_token(self) -> bool:
        return any(choice.num_output_tokens for choice in self.choices)

    def when_expired(self, callback: Callable[[], object]) -> None:
        """Calls it at the request's deadline, or now if that has passed, unless ``close`` comes
        before it; even when all has come: a client may not have read it."""
        self._on_expiry = callback
        if self._has_expired:
            callback()

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def seconds_left(self) -> float:
        return max(0, self.plan.deadline_ns - self._clock.now_ns()) / NS_PER_S

    @property
    def stage(self) -> str:
        """How far the request has come, for those who ask why it ended."""
        if any(choice.is_held for choice in self.choices):
            return "route"
        if self.has_token:
            return "decode"
        return "first_token" if self._has_begun else "tokenise"

    async def wait(self) -> None:
        """Returns when there is something to take or all is done; raises what ended the request."""
        if not self._changed and not self.is_done:
            await self._next_news()
        if self.error is not None:
            raise self.error

    async def wait_all(self) -> None:
        """Returns when every choice has finished; raises what ended the request."""
        while not self.is_done:
            await self._next_news()
            if self.error is not None:
                raise self.error

    def take_changed(self) -> Iterable[Choice]:
        """Those that have gained something since the last call; what, each of them gives itself."""
        changed, self._changed = self._changed, {}
        return changed.values()

    def mark_flushed(self, *, has_content: bool) -> None:
        """Call when the first content, and the last bytes, have been handed to the client's
        connection."""
        is_first = has_content and self.plan.is_streamed and not self.has_flushed
        if is_first:
            self.has_flushed = True
            self.timeline.mark(Event.FIRST_FLUSH, self._clock.now_ns())
        if self.is_done:
            self.timeline.mark(Event.FINISHED, self._clock.now_ns())

    def cancel(self) -> None:
        """The client went away: aborts everywhere, whatever the stage."""
        if self.error is None and not self.is_done:
            metrics.CANCELS.labels(stage=self.stage).inc()
            self._end_with(CancelledError("the client went away", stage=self.stage))

    def fail(self, error: IsthmusError) -> None:
        """Ends the request from outside."""
        if self.error is None and not self.is_done:
            self._end_with(error)

    def break_off(self, error: IsthmusError) -> None:
        """Ends the request for what its answer's way out suffered, even behind the last token."""
        if self.error is None:
            self._end_with(error)

    def close(self) -> None:
        """Frees everything and counts the request, once."""
        self._deadline.cancel()
        if self._accounting is not None:
            if not self.is_done and self.error is None:
                self.cancel()
            accounting, self._accounting = self._accounting, None
            accounting.count()

    # --- ChoiceOwner ----------------------------------------------------------------------------
    def on_first_token(self, choice: Choice) -> None:
        if not self.plan.is_streamed:
            self.timeline.mark(Event.FIRST_FLUSH, self._clock.now_ns())
        if choice.index % self.plan.num_choices == 0:
            self._fan_out(choice)

    def on_change(self, choice: Choice) -> None:
        self._changed[choice.index] = choice
        if choice.state is ChoiceState.FINISHED:
            self._num_done += 1
            self.is_done = self._num_done == len(self.choices)
        self._tell()

    def on_choice_failed(self, error: IsthmusError) -> None:
        """One sequence lost is the request lost: an answer with a hole in it helps nobody."""
        if self.error is None:
            self._end_with(error)

    # --- inside ---------------------------------------------------------------------------------
    def _next_news(self) -> asyncio.Future[None]:
        """One waits at a time. A future, not an event: there is one for each token."""
        self._waiter = waiter = self._loop.create_future()
        if self.error is not None:
            waiter.set_result(None)
        return waiter

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fan_out(self, first: Choice) -> None:
        """The prompt's KV lies on the first choice's decode instance now: the others go there."""
        decision = first.decision
        instance = decision.decode.instance_id if decision and decision.decode else None
        for choice in self.choices[first.index + 1 : first.index + self.plan.num_choices]:
            if self.error is None:
                choice.prompt_logprobs = first.prompt_logprobs
                choice.submit(instance)

    def _expire(self) -> None:
        seconds = (self.plan.deadline_ns - self.plan.arrival_ns) / NS_PER_S
        message = f"the request did not end within {seconds:g} s (stage: {self.stage})"
        self.fail(DeadlineError(message, stage=self.stage))
        self._has_expired = True
        if self._on_expiry is not None:
            self._on_expiry()

    def _end_with(self, error: IsthmusError) -> None:
        self.error = error
        for choice in self.choices:
            choice.abort(error.code)
        self._tell()
