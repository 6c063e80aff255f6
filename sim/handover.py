"""KV from a prefill instance to a decode instance, once its prompt is computed.

Chunks leave while later ones are computed, so what is still to be sent then is the last chunk, or
more where the link was slower than the compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from isthmus.common.clock import NS_PER_MS
from isthmus.common.types import InstanceRef, RouteDecision
from isthmus.router import Router
from isthmus.sim.distserve import PromptsFirstInstance
from isthmus.sim.events import EventQueue
from isthmus.sim.flight import Flight
from isthmus.sim.instance import Instance
from isthmus.sim.links import Links

SimInstance = Instance | PromptsFirstInstance
InstanceAt = Callable[[InstanceRef | None], SimInstance | None]


class Handovers:
    """``instance_at``: who is there under an id and an epoch. Owns the links."""

    def __init__(
        self, queue: EventQueue, router: Router, instance_at: InstanceAt, setup_ms: float
    ) -> None:
        self.links = Links(queue)
        self.num_bytes = 0.0  # sent from one instance to another
        self._queue = queue
        self._router = router
        self._instance_at = instance_at
        self._setup_ns = round(setup_ms * NS_PER_MS)

    def begin(self, flight: Flight, decision: RouteDecision) -> None:
        """Its prompt has been computed by ``decision.prefill``."""
        self._queue.after(self._setup_ns, self._send, (flight, decision))

    def cancel(self, flight: Flight) -> None:
        if flight.transfer is not None:
            self.links.cancel(flight.transfer)
            flight.transfer = None

    def _send(self, planned: tuple[Flight, RouteDecision]) -> None:
        flight, decision = planned
        if flight.decision is not decision or flight.prefill is None or flight.decode is None:
            return
        source, target = self._instance_at(decision.prefill), self._instance_at(decision.decode)
        if source is None or target is None:
            return
        prompt, spec = flight.prefill, source.spec
        token_bytes = max(spec.kv_token_bytes, target.spec.kv_token_bytes)
        missing = prompt.num_prompt - flight.decode.num_computed
        computed = prompt.num_prompt - prompt.num_cached
        last_chunk = min(missing, (computed - 1) % spec.max_num_batched_tokens + 1)
        elapsed_ms = (self._queue.now_ns - prompt.started_ns) / NS_PER_MS
        sent = elapsed_ms * min(spec.link_bytes_per_ms, target.spec.link_bytes_per_ms)
        self.num_bytes += missing * token_bytes
        left = max(last_chunk * token_bytes, missing * token_bytes - sent)
        flight.transfer = self.links.send(
            spec.instance_id,
            target.spec.instance_id,
            left,
            partial(self._arrived, flight, left, self._queue.now_ns),
        )

    def _arrived(self, flight: Flight, num_bytes: float, began_ns: int) -> None:
        flight.transfer = None
        decision = flight.decision
        assert decision is not None, "whoever takes a decision back cancels its transfer"
        self._measure(decision, num_bytes, began_ns)
        source, target = self._instance_at(decision.prefill), self._instance_at(decision.decode)
        first_ns = began_ns
        if source is not None and flight.prefill is not None:
            first_ns = flight.prefill.first_ns
            source.let_go(flight.prefill)
            flight.prefill = None
        if target is not None and flight.decode is not None:
            target.arrived(flight.decode, first_ns)

    def _measure(self, decision: RouteDecision, num_bytes: float, began_ns: int) -> None:
        """As an instance tells the router how fast its writes are."""
        if decision.prefill is None or decision.decode is None:
            return
        source = self._router.cluster.get(decision.prefill.instance_id)
        target = self._router.cluster.get(decision.decode.instance_id)
        if source is not None and target is not None:
            elapsed_ms = (self._queue.now_ns - began_ns) / NS_PER_MS
            links = self._router.knowledge.links
            links.observe(source.info, target.info, int(num_bytes), elapsed_ms)
