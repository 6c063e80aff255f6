"""One output sequence of a request: routed, submitted, detokenised, and carried over a failure.

::

    IDLE ── submit ──▶ WAITING ── first token ──▶ STREAMING ── finish ──▶ FINISHED
                        │  ▲ one retry elsewhere    │  ▲ resume: prompt + delivered tokens
                        └──┘                        └──┘
    any ── abort ──▶ ABORTED      any ── not recoverable ──▶ FAILED

Where it goes, before the first token or behind it, its ``Placing`` finds out, which waits while no
instance can serve; the choice then goes on where it was.

A ``Choice`` is the sink of its own stream and runs in callbacks of the event loop; it owns no task.
It tells its ``Exchange`` through ``ChoiceOwner`` when there is something to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, Protocol

from isthmus.common import metrics
from isthmus.common.clock import Clock
from isthmus.common.errors import InstanceLostError, IsthmusError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.state_machine import Transitions
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import (
    FinishReason,
    InstanceRef,
    LocalPrefillReason,
    Request,
    RouteDecision,
    TokenLogprob,
)
from isthmus.gateway.decode_client import DecodeClient, GenerationEnd
from isthmus.gateway.goodput import GoodputWindow
from isthmus.gateway.placing import Placing
from isthmus.gateway.plan import ChoiceDelta, GenerationPlan, PreparedPrompt
from isthmus.gateway.router_client import ChoiceQuery, RouterClient
from isthmus.gateway.sequence_output import SequenceOutput
from isthmus.gateway.tokenizer import TextTokenizer
from isthmus.gateway.waiting import WaitingRoom

MAX_RESUMES = 3


class ChoiceState(Enum):
    IDLE = "idle"
    WAITING = "waiting"
    STREAMING = "streaming"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    __hash__ = object.__hash__  # looked up many times a request


_ENDS = frozenset({ChoiceState.FINISHED, ChoiceState.ABORTED, ChoiceState.FAILED})
CHOICE_TRANSITIONS: Transitions[ChoiceState] = Transitions(
    {
        ChoiceState.IDLE: frozenset({ChoiceState.WAITING, ChoiceState.ABORTED, ChoiceState.FAILED}),
        ChoiceState.WAITING: frozenset({ChoiceState.STREAMING}) | _ENDS,
        ChoiceState.STREAMING: _ENDS,
        ChoiceState.FINISHED: frozenset(),
        ChoiceState.ABORTED: frozenset(),
        ChoiceState.FAILED: frozenset(),
    }
)


class ChoiceOwner(Protocol):
    @property
    def timeline(self) -> Timeline:
        """Of the request, as far as it is no choice's own."""
        ...

    def on_first_token(self, choice: Choice) -> None: ...

    def on_change(self, choice: Choice) -> None: ...

    def on_choice_failed(self, error: IsthmusError) -> None: ...


@dataclass(frozen=True, slots=True)
class ChoiceServices:
    """What every choice of this gateway uses."""

    router: RouterClient
    decode_client: DecodeClient
    tokenizer: TextTokenizer
    clock: Clock
    on_decode_loss: Literal["resume", "error"]
    waiting: WaitingRoom
    goodput: GoodputWindow


class Choice:
    def __init__(
        self,
        index: int,
        prompt: PreparedPrompt,
        plan: GenerationPlan,
        services: ChoiceServices,
        owner: ChoiceOwner,
    ) -> None:
        self.index = index
        self.is_echo = plan.is_echo
        self.prompt = prompt
        self.state = ChoiceState.IDLE
        self.decision: RouteDecision | None = None
        self.local_reason = LocalPrefillReason.NONE
        self.timeline = Timeline()
        self.num_cached_tokens = 0
        self.num_retries = 0
        self.transferred_bytes = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self._plan = plan
        self._sampling = plan.sampling_of(prompt, index % plan.num_choices)
        self._services = services
        self._owner = owner
        self._excluded: set[InstanceRef] = set()
        self._failed_prefills: set[InstanceId] = set()  # of this decision, as the router knows
        self._output = SequenceOutput(
            plan, prompt, self._sampling, services.tokenizer, services.clock
        )
        self._num_resumed = 0  # tokens that had come before this decision
        self._request_id = RequestId("")
        self._placing = Placing(services.router, services.waiting, self)

    # --- driven by the exchange -----------------------------------------------------------------
    @property
    def is_done(self) -> bool:
        return self.state in _ENDS

    def submit(self, prefer_decode: InstanceId | None = None) -> None:
        """Routes and sends. Errors come through the owner, like later ones. With an instance to
        prefer, since its prompt is there, it does not wait for its turn again."""
        self._move(ChoiceState.WAITING)
        self._placing.first(self._query(prefer_decode), may_wait=prefer_decode is None)

    def abort(self, reason: str) -> None:
        """Ends the sequence here and on its instance; a no-op once it has ended."""
        if self.is_done:
            return
        was_idle = self.state is ChoiceState.IDLE
        self._move(ChoiceState.ABORTED)
        self._placing.cancel()
        if not was_idle and self.decision is not None:
            self._leave_instance(reason)
            self._services.router.report_cancelled(self.decision)

    @property
    def is_held(self) -> bool:
        """Waits for an instance to be ready, or for the router's answer."""
        return self._placing.is_waiting

    @property
    def num_output_tokens(self) -> int:
        return self._output.num_tokens

    @property
    def tpot_s(self) -> float | None:
        return self._output.tpot_s

    @property
    def has_prompt_logprobs(self) -> bool:
        return self._plan.sampling.prompt_logprobs is not None

    def take(self) -> ChoiceDelta:
        """What has come since the last call."""
        return self._output.take()

    # --- Placeable ------------------------------------------------------------------------------
    def on_placed(self, decision: RouteDecision) -> None:
        try:
            self._send(decision)
        except InstanceLostError as error:
            self._recover(error, error.instance_id)

    def on_unplaced(self, error: IsthmusError) -> None:
        self._fail(error)

    def fresh_query(self) -> ChoiceQuery:
        self._excluded.clear()
        return self._query()

    # --- GenerationSink -------------------------------------------------------------------------
    def on_started(self, num_cached_tokens: int, failed_prefills: Sequence[str]) -> None:
        if not self.num_retries:
            self.num_cached_tokens = num_cached_tokens
        self._blame(failed_prefills)

    def on_timeline(self, timeline: Timeline) -> None:
        self.timeline.merge(timeline)

    def on_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        prompt_logprobs: Sequence[TokenLogprob],
    ) -> None:
        if self.is_done:
            return
        if prompt_logprobs:
            self.prompt_logprobs.extend(prompt_logprobs)
        if self._output.push(token_ids, logprobs):
            self._leave_instance("stop string")
            self._finish(FinishReason.STOP, None)
            return
        if self.state is ChoiceState.WAITING and token_ids:
            self._first_token()
        if self._output.has_news and not self.is_done:
            self._owner.on_change(self)

    def on_finished(self, end: GenerationEnd) -> None:
        if self.is_done:
            return
        if end.reason in (FinishReason.ABORT, FinishReason.ERROR):
            instance = self._instance_id()
            message = f"{instance} gave the sequence up"
            self._recover(
                InstanceLostError(message, stage="decode", instance_id=instance), instance
            )
            return
        if self.num_retries == 0:
            self.num_cached_tokens = end.usage.num_cached_tokens
        self.timeline.merge(end.timeline)
        self.transferred_bytes += end.transferred_bytes
        self.local_reason = end.local_reason
        self._blame(end.failed_prefills)
        asked = end.stop_token_id not in self._services.tokenizer.eos_token_ids
        self._finish(end.reason, end.stop_token_id if asked else None)

    def on_failed(self, error: IsthmusError, failed_instance: str) -> None:
        if not self.is_done:
            # Nobody named: it was the decode instance's own doing, which must not be asked again.
            self._recover(error, failed_instance or error.instance_id or self._instance_id())

    # --- the sequence's progress ----------------------------------------------------------------
    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        if self.state is ChoiceState.WAITING:
            self._first_token()
            if self.is_done:  # no place for one of its siblings: that has ended the request
                return
        self._output.finish(reason, stop_reason)
        self.timeline.mark(Event.LAST_TOKEN, self._services.clock.now_ns())
        self._move(ChoiceState.FINISHED)
        if self.decision is not None:
            tpot_s = self.tpot_s
            tpot_ms = None if tpot_s is None else 1000 * tpot_s
            parts = (self._owner.timeline, self.timeline)
            num_tokens = len(self._output.token_ids) - self._num_resumed
            self._services.router.report_finished(self.decision, tpot_ms, parts, num_tokens)
        self._owner.on_change(self)

    def _first_token(self) -> None:
        self._move(ChoiceState.STREAMING)
        if self.decision is not None:
            self._services.router.report_first_token(self.decision)
        self._owner.on_first_token(self)

    def _blame(self, failed_prefills: Sequence[str]) -> None:
        """Tells the router, once each, who let the request down although it is served."""
        for name in failed_prefills:
            instance_id = InstanceId(name)
            if self.decision is not None and instance_id not in self._failed_prefills:
                self._failed_prefills.add(instance_id)
                self._services.router.report_prefill_failed(self.decision, instance_id)

    # --- instances ------------------------------------------------------------------------------
    def _send(self, decision: RouteDecision) -> None:
        self.decision = decision
        self._num_resumed = len(self._output.token_ids)
        self._failed_prefills.clear()
        self.timeline.mark(Event.ROUTED, self._services.clock.now_ns())
        self.local_reason = decision.local_reason
        self._request_id = self._attempt_id()
        self._services.decode_client.submit(self._request(), decision, self)

    def _attempt_id(self) -> RequestId:
        return RequestId(f"{self._plan.request_id}-{self.index}.{self.num_retries}")

    def _request(self) -> Request:
        sampling, token_ids = self._sampling, self.prompt.token_ids
        if self._output.token_ids:
            sampling = replace(sampling, prompt_logprobs=None)
            token_ids = (*token_ids, *self._output.token_ids)
        return Request(
            request_id=self._request_id,
            model=self._plan.model,
            token_ids=token_ids,
            sampling=sampling,
            arrival_ns=self._plan.arrival_ns,
            deadline_ns=self._plan.deadline_ns,
            slo=self._plan.slo,
            tenant=self._plan.tenant,
            cache_salt=self._plan.cache_salt,
            num_resumed_tokens=len(self._output.token_ids),
            first_token_ns=self._output.first_token_ns,
        )

    def _query(self, prefer_decode: InstanceId | None = None) -> ChoiceQuery:
        return ChoiceQuery(
            request_id=self._attempt_id(),
            plan=self._plan,
            prompt=self.prompt,
            num_resumed_tokens=len(self._output.token_ids),
            exclude=self._services.router.still_there(self._excluded),
            prefer_decode=prefer_decode,
            needs_whole_prompt=self._sampling.prompt_logprobs is not None,
        )

    def _recover(self, error: IsthmusError, failed_instance: str) -> None:
        """Another instance when the rules allow it, else the end of this choice."""
        failed = InstanceId(failed_instance)
        if (end := self._output.natural_end()) is not None:
            self._finish(end, None)  # all that it owed had come, but for its last word
            return
        last, self.num_retries = self.decision, self.num_retries + 1
        if last is None or not self._may_retry(error):
            if last is not None:
                self._services.router.report_failed(last, error, failed)
            self._fail(error)
            return
        legs = (last.decode, last.prefill)
        self._excluded.update(leg for leg in legs if leg and leg.instance_id == failed)
        reason = "resume" if self._output.token_ids else "retry"
        metrics.RETRIES.labels(reason=reason).inc()
        self._placing.again(self._query(), last, error, failed)

    def _may_retry(self, error: IsthmusError) -> bool:
        if not error.retryable:
            return False
        if self._output.token_ids:
            can_resume = self._services.on_decode_loss == "resume"
            return can_resume and self.num_retries <= MAX_RESUMES
        return self.num_retries <= 1

    def _fail(self, error: IsthmusError) -> None:
        self._move(ChoiceState.FAILED)
        self._owner.on_choice_failed(error)

    def _leave_instance(self, reason: str) -> None:
        self._services.decode_client.abort(self._instance_id(), self._request_id, reason)

    def _instance_id(self) -> InstanceId:
        decode = self.decision.decode if self.decision is not None else None
        return decode.instance_id if decode is not None else InstanceId("")

    def _move(self, state: ChoiceState) -> None:
        self.state = CHOICE_TRANSITIONS.check(self.state, state)
