"""The gateway's way to a router, its own or another process's: questions out, outcomes in.

Also answers what the gateway must know of the cluster before it can ask (block size and fingerprint
for the hashes, the longest sequence, who is there), from its own view of it. Nothing here waits:
answers come by callback, those of an embedded router mostly before the call returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from isthmus.common.backoff import SHORT_WAIT_MS, retry_after_ms
from isthmus.common.clock import Clock
from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.errors import InstanceLostError, IsthmusError, NoInstanceError, TransferError
from isthmus.common.hashing import block_hashes, root_hash
from isthmus.common.ids import DecisionId, HashChain, InstanceId, RequestId
from isthmus.common.logging import get_logger
from isthmus.common.timeline import Timeline
from isthmus.common.types import InstanceRef, RouteDecision
from isthmus.gateway.decider import Asker, Decider
from isthmus.gateway.plan import GenerationPlan, PreparedPrompt
from isthmus.router.cluster_view import ClusterView
from isthmus.router.router import Router
from isthmus.router.types import Outcome, RouteQuery

_SERVING = (InstanceState.READY, InstanceState.DRAINING)
MAX_BEHIND = 4
"""Reports that let a client's bytes go first. More come together only under load, when those who
wait in the router count more than one of them does."""
_log = get_logger("router_client")


@dataclass(frozen=True, slots=True)
class ChoiceQuery:
    """One sequence to be placed: the parts of a RouteQuery that the choice knows."""

    request_id: RequestId
    plan: GenerationPlan
    prompt: PreparedPrompt
    num_resumed_tokens: int
    exclude: frozenset[InstanceId]
    prefer_decode: InstanceId | None
    needs_whole_prompt: bool

    def to_route_query(self) -> RouteQuery:
        return RouteQuery(
            request_id=self.request_id,
            model=self.plan.model,
            num_prompt_tokens=len(self.prompt.token_ids) + self.num_resumed_tokens,
            hash_chains=self.prompt.hash_chains,
            slo=self.plan.slo,
            tenant=self.plan.tenant,
            session=self.plan.session,
            arrival_ns=self.plan.arrival_ns,
            deadline_ns=self.plan.deadline_ns,
            max_output_tokens=max(1, self.prompt.max_tokens - self.num_resumed_tokens),
            exclude=self.exclude,
            prefer_decode=self.prefer_decode,
            needs_whole_prompt=self.needs_whole_prompt,
        )


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What every request must know of the instances there are, found out once for each change of
    them. ``kinds``: model fingerprint and block size, which decide what a prompt's hashes are."""

    num_changes: int
    model: str | None
    max_model_len: int | None
    can_decode: bool
    kinds: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, cluster: ClusterView) -> ClusterFacts:
        infos = [view.info for view in cluster]
        return cls(
            cluster.num_changes,
            next((info.model for info in infos), None),
            min((info.max_model_len for info in infos), default=None),
            any(info.role is not Role.PREFILL for info in infos),
            frozenset((info.kv_layout.model_fingerprint, info.block_size) for info in infos),
        )


class RouterClient:
    """``router``: whose view of the cluster this is; ``decider``: who is asked."""

    def __init__(self, router: Router, clock: Clock, decider: Decider) -> None:
        self._router = router
        self._clock = clock
        self._decider = decider
        self._known = ClusterFacts.of(router.cluster)
        self._behind: list[tuple[DecisionId, Callable[[], Outcome]]] = []

    def route(self, query: ChoiceQuery, asker: Asker, *, may_wait: bool) -> None:
        """``asker`` hears once what came of it, unless it withdraws first."""
        self._tell_behind()
        self._decider.ask(query.to_route_query(), asker, may_wait=may_wait)

    def reroute(
        self,
        query: ChoiceQuery,
        last: RouteDecision,
        error: IsthmusError,
        failed: InstanceId,
        asker: Asker,
    ) -> None:
        """A new decision after ``last`` came to nothing; its reservation is given back."""
        self.report_failed(last, error, failed)
        self._decider.ask_again(query.to_route_query(), asker, failed=failed, reason=error.code)

    def withdraw(self, request_id: RequestId) -> None:
        """Nobody wants to know any more."""
        self._tell_behind()
        self._decider.withdraw(request_id)

    def report_first_token(self, decision: RouteDecision) -> None:
        self._report_behind(decision.decision_id, Outcome.first_token)

    def report_prefill_failed(self, decision: RouteDecision, failed: InstanceId) -> None:
        """``failed`` let the request down, which goes on without it."""
        self._report(decision.decision_id, Outcome.prefill_failed(failed))

    def report_finished(
        self,
        decision: RouteDecision,
        tpot_ms: float | None,
        timelines: Sequence[Timeline],
        num_output_tokens: int,
    ) -> None:
        """``timelines``: parts of the whole. ``num_output_tokens``: since this decision, which is
        what its kind of request costs."""

        def outcome() -> Outcome:
            whole = Timeline()
            for part in timelines:
                whole.merge(part)
            return Outcome.finished(tpot_ms, whole, num_output_tokens)

        self._report_behind(decision.decision_id, outcome)

    def report_cancelled(self, decision: RouteDecision) -> None:
        self._report(decision.decision_id, Outcome.cancelled())

    def report_failed(
        self, decision: RouteDecision, error: IsthmusError, failed: InstanceId
    ) -> None:
        """Blames an instance only for what an instance can do wrong."""
        if isinstance(error, InstanceLostError | TransferError) or error.http_status == 500:
            outcome = Outcome.failed(failed or None)
        elif error.retryable:
            outcome = Outcome.refused()
        else:
            outcome = Outcome.failed(None)
        self._report(decision.decision_id, outcome)

    def instances(self) -> Iterator[InstanceInfo]:
        return (view.info for view in self._router.cluster)

    def still_there(self, refs: Collection[InstanceRef]) -> frozenset[InstanceId]:
        """Those of these that have not restarted since: whoever has is a new instance."""
        if not refs:  # as mostly
            return frozenset()
        at_epoch = self._router.cluster.at_epoch
        return frozenset(
            ref.instance_id for ref in refs if at_epoch(ref.instance_id, ref.epoch) is not None
        )

    def servers(self) -> Iterator[InstanceId]:
        """Decode and mixed instances that the router would choose from now."""
        now_ns = self._clock.monotonic_ns()
        return (
            view.instance_id
            for view in self._router.cluster
            if view.info.role is not Role.PREFILL and view.is_usable(now_ns)
        )

    def decode_refs(self) -> list[InstanceRef]:
        """Instances to which a stream must be open."""
        return [
            info.ref
            for info in self.instances()
            if info.role in (Role.DECODE, Role.MIXED) and info.state in _SERVING
        ]

    def require_decode(self) -> None:
        """Raises NoInstanceError when nobody could serve, before any work is done for a request."""
        if not self._facts().can_decode:
            message = "no decode or mixed instance is registered"
            raise NoInstanceError(
                message,
                stage="route",
                retry_after_ms=retry_after_ms(SHORT_WAIT_MS),
                reason="pool_empty",
            )

    def hash_prompt(self, token_ids: Sequence[int], cache_salt: str) -> tuple[HashChain, ...]:
        """Hashes of the full blocks as the instances make them, one chain for each size of block
        and model that they have; empty while no instance is known."""
        return tuple(
            [
                tuple(block_hashes(token_ids, block_size, root_hash(fingerprint, cache_salt)))
                for fingerprint, block_size in self._facts().kinds
            ]
        )

    def model(self) -> str | None:
        """What the instances serve; None while none is known."""
        return self._facts().model

    def max_model_len(self) -> int | None:
        """The longest sequence that every serving instance accepts; None while none is known."""
        return self._facts().max_model_len

    # --- inside ---------------------------------------------------------------------------------
    def _report(self, decision_id: DecisionId, outcome: Outcome) -> None:
        self._tell_behind()
        self._decider.report(decision_id, outcome)

    def _report_behind(self, decision_id: DecisionId, outcome: Callable[[], Outcome]) -> None:
        """For news of tokens: behind what they give the client, who waits for it. That is written
        in the next turn of the event loop, so the router is told in the one after it; and at once
        before it is told or asked anything else, so that all comes to it in order."""
        self._behind.append((decision_id, outcome))
        if len(self._behind) > MAX_BEHIND:
            self._tell_behind()
        elif len(self._behind) == 1:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._tell_behind)

    def _tell_behind(self) -> None:
        if not self._behind:
            return
        behind, self._behind = self._behind, []
        for decision_id, outcome in behind:
            try:
                self._decider.report(decision_id, outcome())
            except Exception:  # noqa: BLE001 (one decision's fault must not end another request)
                _log.exception("an outcome could not be reported", decision_id=decision_id)

    def _facts(self) -> ClusterFacts:
        if self._known.num_changes != self._router.cluster.num_changes:
            self._known = ClusterFacts.of(self._router.cluster)
        return self._known
