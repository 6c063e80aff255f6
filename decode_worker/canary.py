"""Now and then a request that was served with a peer's KV is computed again here, and compared.

::

    served ─▶ waiting ── nothing else to do ─▶ running ─▶ compared: equal, near_tie, mismatch
                 ▲ a later one takes its place    │
                 └───────── a request comes ──────┘ interrupted

Checksums tell that what arrived is what was sent; only computing it again tells that it was right.
The prompt is computed whole: the canary neither finds nor leaves anything in the prefix cache, else
it would compare damage with itself. It runs while the instance has nothing else to do and gives way
at the next step, so it costs a request at most the rest of one step.

Only greedy requests are compared. Where two tokens are about equally likely, another batch may
rightly choose the other one: the first difference counts as ``near_tie`` then, and what follows it
is another text and says nothing. A prompt that was computed over KV of another dtype, which was
converted on its way, is not compared: attention over quantised KV rightly differs by more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from isthmus.common.errors import IsthmusError
from isthmus.common.ids import RequestId
from isthmus.common.logging import get_logger
from isthmus.common.types import FinishReason, InstanceRef, Request, TokenLogprob
from isthmus.engine.types import SequenceMode, SequenceUpdate
from isthmus.worker.role import WorkerRuntime

MAX_TOKENS = 32
# Between logits in bfloat16 (8 bits of precision) of the usual size, sums in another order differ
# by less.
NEAR_TIE_NATS = 0.1
_NUM_ALTERNATIVES = 5

log = get_logger("canary")


class CanaryResult(Enum):
    EQUAL = "equal"
    NEAR_TIE = "near_tie"
    MISMATCH = "mismatch"
    INTERRUPTED = "interrupted"
    FAILED = "failed"  # it could not be computed here
    SKIPPED = "skipped"  # its prompt was computed over KV of another dtype


@dataclass(frozen=True, slots=True)
class Served:
    """A finished request whose prompt ``source`` computed, and the tokens the client was given."""

    request: Request
    token_ids: tuple[int, ...]
    source: InstanceRef

    @property
    def can_be_compared(self) -> bool:
        is_whole = not self.request.num_resumed_tokens and bool(self.token_ids)
        return self.request.sampling.is_greedy and is_whole


@dataclass(slots=True)
class _Run:
    served: Served
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Canary:
    """Belongs to the event loop."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._every = runtime.config.transfer.canary_every
        self._num_served = 0
        self._waiting: Served | None = None
        self._run: _Run | None = None

    def served(self, served: Served | None) -> None:
        """A request has ended; every ``canary_every``-th that can be compared is kept for it."""
        if not self._every or served is None or not served.can_be_compared:
            return
        self._num_served += 1
        if self._num_served % self._every:
            return
        if self._has_like_kv(served.source):
            self._waiting = served
        else:
            self._count(CanaryResult.SKIPPED)

    def _has_like_kv(self, source: InstanceRef) -> bool:
        """Whether this instance would compute the same prompt over KV of the same precision. False
        also for a peer that has been forgotten meanwhile."""
        theirs = self._runtime.transfers.layout_of(source)
        return theirs is not None and theirs.dtype == self._runtime.engine.kv_layout.dtype

    def start_if_idle(self) -> None:
        """Call when the last request has ended."""
        load = self._runtime.engine.load()
        if self._waiting is None or self._run or load.running_seqs or load.waiting_seqs:
            return
        served, self._waiting = self._waiting, None
        request = _again(served)
        try:
            self._runtime.engine.add(request, SequenceMode.PRIVATE)
        except IsthmusError as error:
            self._count(CanaryResult.FAILED)
            log.warning("canary refused", request_id=request.request_id, reason=error.message)
            return
        self._run = _Run(served, request)

    def make_way(self) -> None:
        """A request has come: the canary is tried again when there is time."""
        run, self._run = self._run, None
        if run is None:
            return
        self._runtime.engine.abort(run.request.request_id)
        self._waiting = self._waiting or run.served
        self._count(CanaryResult.INTERRUPTED)

    def close(self) -> None:
        """No canary begins any more."""
        self.make_way()
        self._waiting, self._every = None, 0

    def on_update(self, update: SequenceUpdate) -> None:
        """Updates of other requests are ignored."""
        run = self._run
        if run is None or update.request_id != run.request.request_id:
            return
        run.token_ids += update.token_ids
        run.logprobs += update.logprobs
        if update.error is not None or update.finish_reason is FinishReason.ERROR:
            self._run = None
            self._count(CanaryResult.FAILED)
        elif update.finish_reason is not None:
            self._run = None
            self._judge(run)

    def _judge(self, run: _Run) -> None:
        expected = run.served.token_ids[: run.request.sampling.max_tokens]
        result, place = compare(expected, run.token_ids, run.logprobs)
        self._count(result)
        self._runtime.metrics.canary_computed(len(run.request.token_ids))
        if result is not CanaryResult.MISMATCH:
            return
        self._runtime.metrics.canary_mismatch(run.served.source.instance_id)
        log.error(
            "canary: what was served is not what this instance computes",
            request_id=run.served.request.request_id,
            prefill=run.served.source.instance_id,
            prefill_epoch=run.served.source.epoch,
            place=place,
            served=list(expected[place : place + 4]),
            computed=run.token_ids[place : place + 4],
        )

    def _count(self, result: CanaryResult) -> None:
        self._runtime.metrics.canary(result.value)


def compare(
    served: Sequence[int], computed: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> tuple[CanaryResult, int]:
    """The verdict, and the place of the first difference. ``logprobs`` belong to ``computed``."""
    pairs = zip(served, computed, strict=False)
    place = next((place for place, (mine, own) in enumerate(pairs) if mine != own), None)
    if place is None:
        shorter = min(len(served), len(computed))
        is_equal = len(served) == len(computed)
        return (CanaryResult.EQUAL if is_equal else CanaryResult.MISMATCH), shorter
    if place < len(logprobs):
        chosen = logprobs[place]
        other = dict(chosen.top).get(served[place])
        if other is not None and chosen.logprob - other <= NEAR_TIE_NATS:
            return CanaryResult.NEAR_TIE, place
    return CanaryResult.MISMATCH, place


def _again(served: Served) -> Request:
    """The same request once more, as far as it is compared. Its deadline means nothing to the
    engine: nobody waits for it, and it gives way to whoever does."""
    request = served.request
    return replace(
        request,
        request_id=RequestId(f"canary-{request.request_id}"),
        sampling=replace(
            request.sampling,
            max_tokens=min(len(served.token_ids), MAX_TOKENS),
            logprobs=_NUM_ALTERNATIVES,
            prompt_logprobs=None,
        ),
    )
