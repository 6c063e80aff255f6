"""A small cluster on virtual time that a router drives: for tests of order, admission and learning.

Prefill instances work off prompts one after the other, decode instances step all their sequences
together; both take what a ``LatencyModel`` says, times a slowness that a test may change. Only what
the router can see in a real cluster goes back to it: load reports, first tokens, ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.common.attainment import Measured, Verdict, judge
from isthmus.common.clock import NS_PER_MS, VirtualClock
from isthmus.common.cluster import NO_STEPS, LatencyModel, LoadReport, Role, StepTotals
from isthmus.common.config import RouterConfig
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import InstanceId, RequestId
from isthmus.common.types import RouteDecision, Slo
from isthmus.router import Outcome, RouteQuery, Router
from isthmus.router.verdict import Admitted, Held, Rejected
from tests.support.router_cluster import BLOCK_SIZE, LATENCY, make_info

REPORT_MS = 100.0


@dataclass(eq=False)
class Job:
    """One request and what became of it."""

    query: RouteQuery
    arrived_ms: float
    output_tokens: int
    decision: RouteDecision | None = None
    error: IsthmusError | None = None
    first_ms: float | None = None
    ended_ms: float | None = None
    left: int = 0

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_ms is None else self.first_ms - self.arrived_ms

    @property
    def tpot_ms(self) -> float | None:
        if self.ended_ms is None or self.first_ms is None or self.output_tokens < 2:
            return None
        return (self.ended_ms - self.first_ms) / (self.output_tokens - 1)

    @property
    def is_good(self) -> bool:
        if self.ended_ms is None:
            return False
        measured = Measured(self.ttft_ms, self.tpot_ms, self.ended_ms - self.arrived_ms)
        return judge(self.query.slo, measured) is Verdict.GOOD


@dataclass
class Instance:
    name: str
    role: Role
    model: LatencyModel
    slowness: float = 1.0
    prompts: list[Job] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    is_busy: bool = False
    totals: StepTotals = NO_STEPS
    seq: int = 0


class World:
    def __init__(
        self,
        prefills: int,
        decodes: int,
        mixed: int = 0,
        latency: LatencyModel = LATENCY,
        tenant_weights: dict[str, float] | None = None,
        reports_steps: bool = True,
        **config: Any,
    ) -> None:
        self.clock = VirtualClock(NS_PER_MS)
        settings = RouterConfig(**{"policy": "goodput", **config})
        self.router = Router(settings, self.clock, tenant_weights=tenant_weights)
        self.router.on_progress = self._wake
        self.jobs: list[Job] = []
        self.max_depth = 0
        self._reports_steps = reports_steps
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._held: dict[RequestId, Job] = {}
        self._wakes_at: float | None = None
        self.instances: dict[str, Instance] = {}
        for prefix, role, count in (
            ("p", Role.PREFILL, prefills),
            ("d", Role.DECODE, decodes),
            ("m", Role.MIXED, mixed),
        ):
            for index in range(count):
                self.join(f"{prefix}{index}", role, latency)

    def join(self, name: str, role: Role, latency: LatencyModel, **changes: Any) -> None:
        info = make_info(
            name, role, latency=latency, num_blocks=20_000, max_num_seqs=256, **changes
        )
        self.instances[name] = Instance(name, role, latency)
        self.router.state.registered(info)
        self._report(self.instances[name])

    @property
    def now_ms(self) -> float:
        return self.clock.monotonic_ns() / NS_PER_MS

    def at(self, when_ms: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_ms, next(self._order), action))

    def offer(
        self, when_ms: float, num_tokens: int, output_tokens: int, slo: Slo | None = None,
        tenant: str = "", timeout_ms: float = 0.0,
    ) -> Job:  # fmt: skip
        """A request that arrives at ``when_ms``."""
        query = RouteQuery(
            RequestId(f"r{len(self.jobs)}"),
            "m",
            num_tokens,
            slo=slo or Slo(),
            tenant=tenant,
            max_output_tokens=output_tokens,
            arrival_ns=int(when_ms * NS_PER_MS),
            deadline_ns=int((when_ms + timeout_ms) * NS_PER_MS) if timeout_ms else 0,
        )
        job = Job(query, when_ms, output_tokens)
        self.jobs.append(job)
        self.at(when_ms, lambda: self._submit(job))
        return job

    def run(self, until_ms: float = float("inf")) -> None:
        """Until nothing is left to happen but reports, or until ``until_ms``."""
        while self._events and self._events[0][0] <= until_ms:
            when_ms, _, action = heapq.heappop(self._events)
            if when_ms > self.now_ms:
                self.clock.advance_ms(when_ms - self.now_ms)
            action()
        if until_ms != float("inf") and until_ms > self.now_ms:
            self.clock.advance_ms(until_ms - self.now_ms)

    def attainment(self, class_name: str) -> float:
        of_class = [job for job in self.jobs if job.query.slo.class_name == class_name]
        return sum(job.is_good for job in of_class) / len(of_class)

    def goodput(self) -> float:
        """Weight of good requests."""
        return sum(job.query.slo.weight for job in self.jobs if job.is_good)

    def outcomes(self) -> Counter[str]:
        return Counter(
            "good" if job.is_good else "rejected" if job.error else "late" for job in self.jobs
        )

    # --- the router's side -----------------------------------------------------------------------
    def _submit(self, job: Job) -> None:
        verdict = self.router.submit(job.query)
        if isinstance(verdict, Held):
            self._held[job.query.request_id] = job
            self._arm()
        else:
            self._settle(job, verdict)

    def _wake(self) -> None:
        self._wake_at(self.now_ms)

    def _wake_at(self, when_ms: float) -> None:
        if self._wakes_at is None or when_ms < self._wakes_at:
            self._wakes_at = when_ms
            self.at(when_ms, lambda: self._tick(when_ms))

    def _tick(self, when_ms: float) -> None:
        if self._wakes_at != when_ms:
            return  # an earlier one has been called
        self._wakes_at = None
        for settled in self.router.tick():
            self._settle(self._held.pop(settled.request_id), settled.verdict)
        self._arm()

    def _arm(self) -> None:
        next_ns = self.router.next_tick_ns()
        if next_ns is not None:
            self._wake_at(max(self.now_ms, next_ns / NS_PER_MS))

    def _settle(self, job: Job, verdict: Admitted | Rejected) -> None:
        assert job.decision is None
        assert job.error is None
        if isinstance(verdict, Rejected):
            job.error = verdict.error
            return
        job.decision = verdict.decision
        at = verdict.decision.prefill or verdict.decision.decode
        assert at is not None
        instance = self.instances[at.instance_id]
        instance.prompts.append(job)
        self.max_depth = max(self.max_depth, len(instance.prompts))
        self._step(instance)

    # --- the instances' side ---------------------------------------------------------------------
    def _step(self, instance: Instance) -> None:
        """One step: the oldest prompt as a whole, beside whatever decodes here."""
        if instance.is_busy or not (instance.prompts or instance.decoding):
            return
        instance.is_busy = True
        batch = list(instance.decoding)
        context = sum(job.query.num_prompt_tokens for job in batch)
        model, prompt = instance.model, instance.prompts[0] if instance.prompts else None
        if prompt is None:
            elapsed_ms = model.decode_step_ms(len(batch), context) * instance.slowness
        else:
            tokens = prompt.query.num_prompt_tokens
            elapsed_ms = model.prefill_ms(tokens) + len(batch) * model.decode_seq
            elapsed_ms = (elapsed_ms + context * model.decode_context) * instance.slowness
        self._count(instance, prompt, len(batch), context, elapsed_ms)
        self.at(self.now_ms + elapsed_ms, lambda: self._end_step(instance, prompt, batch))

    def _count(
        self, instance: Instance, prompt: Job | None, seqs: int, context: int, elapsed_ms: float
    ) -> None:
        old = instance.totals
        if prompt is None:
            instance.totals = replace(
                old,
                decode_steps=old.decode_steps + 1,
                decode_seqs=old.decode_seqs + seqs,
                decode_context=old.decode_context + context,
                decode_ms=old.decode_ms + elapsed_ms,
            )
            return
        tokens = prompt.query.num_prompt_tokens
        instance.totals = replace(
            old,
            prefill_steps=old.prefill_steps + 1,
            prefill_tokens=old.prefill_tokens + tokens,
            prefill_pairs=old.prefill_pairs + tokens * tokens / 2,
            beside_seqs=old.beside_seqs + seqs,
            beside_context=old.beside_context + context,
            prefill_ms=old.prefill_ms + elapsed_ms,
        )

    def _end_step(self, instance: Instance, prompt: Job | None, batch: list[Job]) -> None:
        instance.is_busy = False
        for job in batch:
            job.left -= 1
            if not job.left:
                instance.decoding.remove(job)
                self._end(job)
        if prompt is not None:
            instance.prompts.remove(prompt)
            self._first_token(prompt)
        self._step(instance)

    def _first_token(self, job: Job) -> None:
        assert job.decision is not None
        assert job.decision.decode is not None
        job.first_ms = self.now_ms
        self.router.report(job.decision.decision_id, Outcome.first_token())
        job.left = job.output_tokens - 1
        if not job.left:
            self._end(job)
            return
        decode = self.instances[job.decision.decode.instance_id]
        decode.decoding.append(job)
        self._step(decode)

    def _end(self, job: Job) -> None:
        assert job.decision is not None
        job.ended_ms = self.now_ms
        outcome = Outcome.finished(job.tpot_ms, num_output_tokens=job.output_tokens)
        self.router.report(job.decision.decision_id, outcome)

    def start_reports(self, until_ms: float) -> None:
        for when_ms in self._times(until_ms):
            self.at(when_ms, self._report_all)

    def _times(self, until_ms: float) -> Iterator[float]:
        when_ms = self.now_ms + REPORT_MS
        while when_ms < until_ms:
            yield when_ms
            when_ms += REPORT_MS

    def _report_all(self) -> None:
        for instance in self.instances.values():
            self._report(instance)

    def _report(self, instance: Instance) -> None:
        instance.seq += 1
        waiting = instance.prompts[1:] if instance.is_busy else instance.prompts
        tokens = sum(job.query.num_prompt_tokens for job in instance.prompts)  # as an engine counts
        context = sum(job.query.num_prompt_tokens for job in instance.decoding)
        used = sum(job.query.num_prompt_tokens // BLOCK_SIZE + 1 for job in instance.decoding)
        self.router.state.reported(
            LoadReport(
                InstanceId(instance.name),
                epoch=1,
                seq=instance.seq,
                at_ns=self.clock.now_ns(),
                waiting_seqs=len(waiting),
                waiting_tokens=tokens,
                running_seqs=len(instance.decoding) + (len(instance.prompts) - len(waiting)),
                running_context_tokens=context,
                num_blocks=20_000,
                free_blocks=20_000 - used,
                totals=instance.totals if self._reports_steps else NO_STEPS,
                prompt_seqs=len(instance.prompts),
            )
        )
