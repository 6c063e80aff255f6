"""The simulated cluster: requests through the router's own code and through simulated instances.

Plays the gateway and the decode coordinator: routes, reserves, sends the prompt, hands the KV over,
tells the router what became of it, and routes again what an instance took along when it died::

    arrival ─▶ route ─▶ local: submit to the decode instance ─────────────▶ finished
                  └──▶ pair: reserve on d ─▶ prefill on p ─▶ first token
                                              └─▶ transfer ─▶ arrived on d ─▶ finished

Every request ends exactly once, in ``records``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from isthmus.common.clock import NS_PER_MS, VirtualClock
from isthmus.common.config import RouterConfig
from isthmus.common.errors import IsthmusError, NoInstanceError
from isthmus.common.ids import InstanceId
from isthmus.common.kv_events import KvEvent
from isthmus.common.types import InstanceRef, RouteDecision
from isthmus.router import Outcome, Router
from isthmus.router.verdict import Admitted, Held, Rejected, Settled
from isthmus.sim.distserve import PromptsFirstInstance
from isthmus.sim.events import EventQueue
from isthmus.sim.feed import SimFeed
from isthmus.sim.flight import START_NS, Flight, flight_of
from isthmus.sim.handover import Handovers, SimInstance
from isthmus.sim.instance import Instance
from isthmus.sim.listener import AnyInstance
from isthmus.sim.prefix_fetch import PrefixFetches
from isthmus.sim.records import Record, RequestEnd
from isthmus.sim.requests import SimRequest
from isthmus.sim.router_ticks import RouterTicks
from isthmus.sim.sequence import SimSequence
from isthmus.sim.spec import Batching, InstanceSpec

TICK_SHARE = 0.02  # of the interval of reports, between two looks at who waits


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Times in milliseconds. ``noise``: standard deviation of the logarithm of steps' durations."""

    router: RouterConfig
    report_interval_ms: float = 100.0
    dispatch_ms: float = 1.0  # gateway and network, before an instance has the request
    delivery_ms: float = 0.0  # network and gateway, before the client has a token
    transfer_setup_ms: float = 2.0
    fetch_timeout_ms: float = 2_000.0
    lease_ms: float = 5_000.0
    instance_wait_ms: float = 10_000.0
    request_timeout_ms: float = 600_000.0
    max_attempts: int = 3
    tenant_weights: Mapping[str, float] | None = None
    noise: float = 0.0
    seed: int = 0


_Sent = tuple[Flight, RouteDecision]


class SimCluster:
    """Owns clock, router, instances and links of one run. ``Listener`` of its instances."""

    def __init__(self, settings: ClusterSettings, specs: Iterable[InstanceSpec]) -> None:
        self.settings = settings
        self.clock = VirtualClock(START_NS)
        self.queue = EventQueue(self.clock)
        self.router = Router(settings.router, self.clock, tenant_weights=settings.tenant_weights)
        self.feed = SimFeed(self.queue, self.router.state, settings.report_interval_ms)
        self.handovers = Handovers(
            self.queue, self.router, self._instance, settings.transfer_setup_ms
        )
        self.fetches = PrefixFetches(
            self.queue, self.handovers.links, settings.transfer_setup_ms, settings.fetch_timeout_ms
        )
        self.records: list[Record] = []
        self.instances: dict[InstanceId, SimInstance] = {}
        self.retired: list[SimInstance] = []  # epochs that died
        self.num_open = 0
        self._num_to_come = 0
        self._delivery_ns = round(settings.delivery_ms * NS_PER_MS)
        tick_gap_ns = round(settings.report_interval_ms * NS_PER_MS * TICK_SHARE)
        self._ticks = RouterTicks(self.router, self.queue, self.feed, tick_gap_ns, self._settled)
        self._random = random.Random(settings.seed)
        self._held: dict[Flight, None] = {}  # nobody can serve them now
        self._flights: dict[int, Flight] = {}
        self.router.state.registry_connected(True)
        for spec in specs:
            self._start(spec, 1)
        self.router.state.on_change = self._cluster_changed
        self.router.on_progress = self._ticks.on_progress
        self.feed.on_due = self._ticks.on_held

    # --- the run -------------------------------------------------------------------------------

    def offer(self, requests: Iterable[SimRequest]) -> None:
        """Requests that will arrive, at their time after the start."""
        for request in requests:
            self._num_to_come += 1
            self.queue.at(START_NS + request.arrival_ns, self._arrive, request)

    @property
    def since_start_ns(self) -> int:
        return self.queue.now_ns - START_NS

    @property
    def is_done(self) -> bool:
        return not self._num_to_come and not self.num_open

    def run(self, max_events: int | None = None) -> bool:
        """Runs on; True when every request has ended or nothing is left that could happen."""
        if self.is_done:
            return True
        done = self.queue.run(max_events=max_events)
        return self.is_done or (max_events is None or done < max_events)

    def close(self) -> list[Record]:
        """Ends the run: whoever is still there is UNFINISHED. Returns all records."""
        self.feed.tell(self.queue.now_ns)
        for flight in list(self._flights.values()):
            self._given_up(flight, RequestEnd.UNFINISHED, "the run ended")
        return self.records

    # --- what happens to instances -------------------------------------------------------------

    def kill(self, instance_id: InstanceId) -> None:
        """The process dies: its streams break at once, its lease some time later."""
        instance = self.instances.pop(instance_id, None)
        if instance is None:
            return
        self.feed.lost(instance, "reset")
        lost = instance.kill()
        self.retired.append(instance)
        lease_ns = round(self.settings.lease_ms * NS_PER_MS)
        self.queue.after(lease_ns, self._lease_over, (instance_id, instance.epoch))
        for sequence in lost:
            flight = flight_of(sequence)
            if sequence is flight.decode or sequence is flight.prefill:
                self._lost_leg(flight, sequence, instance_id)

    def start_again(self, instance_id: InstanceId) -> None:
        """A dead instance comes back, empty and with a new epoch."""
        old = next((i for i in reversed(self.retired) if i.spec.instance_id == instance_id), None)
        if old is not None and instance_id not in self.instances:
            self._start(old.spec, old.epoch + 1)

    def slow_down(self, instance_id: InstanceId, factor: float) -> None:
        """From its next step on every step takes ``factor`` times as long as modelled."""
        if instance_id in self.instances:
            self.instances[instance_id].slowness = factor

    def _start(self, spec: InstanceSpec, epoch: int) -> None:
        noise = self._noise if self.settings.noise else None
        is_chunked = spec.batching is Batching.CHUNKED
        kind = Instance if is_chunked else PromptsFirstInstance
        instance: SimInstance = kind(spec, self.queue, self, noise)
        instance.epoch = epoch
        self.handovers.links.add(spec.instance_id, spec.link_bytes_per_ms)
        self.instances[spec.instance_id] = instance
        self.feed.follow(instance)

    def _noise(self) -> float:
        return self._random.lognormvariate(0.0, self.settings.noise)

    def _lease_over(self, named: tuple[InstanceId, int]) -> None:
        instance_id, epoch = named
        if self.router.cluster.at_epoch(instance_id, epoch) is not None:
            self.router.state.deregistered(instance_id)

    # --- the gateway's part --------------------------------------------------------------------

    def _arrive(self, request: SimRequest) -> None:
        self._num_to_come -= 1
        record = Record(request)
        flight = Flight(request, record)
        self.records.append(record)
        self._flights[request.index] = flight
        self.num_open += 1
        wait_ns = round(self.settings.instance_wait_ms * NS_PER_MS)
        flight.held_until_ns = self.queue.now_ns + wait_ns
        if request.cancel_ns is not None:
            self.queue.at(START_NS + request.cancel_ns, self._cancel, flight)
        deadline_ns = (
            START_NS + request.arrival_ns + round(self.settings.request_timeout_ms * NS_PER_MS)
        )
        self.queue.at(deadline_ns, self._timed_out, flight)
        self._route(flight)

    def _route(self, flight: Flight) -> None:
        """The first time it may be held by the router; what is sent again may not."""
        self.feed.tell(self.queue.now_ns - 1)
        query = flight.query(self.settings.request_timeout_ms)
        if flight.record.num_attempts:
            try:
                self._routed(flight, Admitted(self.router.route(query)))
            except IsthmusError as error:
                self._routed(flight, Rejected(error))
            return
        verdict = self.router.submit(query)
        if isinstance(verdict, Held):
            self._ticks.on_held()
        else:
            self._routed(flight, verdict)

    def _routed(self, flight: Flight, verdict: Admitted | Rejected) -> None:
        if isinstance(verdict, Rejected):
            if isinstance(verdict.error, NoInstanceError):
                self._hold(flight, verdict.error)
            else:
                self._end(flight, RequestEnd.REJECTED, verdict.error.reason)
            return
        decision, record = verdict.decision, flight.record
        flight.decision = decision
        record.num_attempts += 1
        record.routed_ns = self.since_start_ns
        record.is_local = decision.prefill is None
        record.predicted_ttft_ms = decision.predicted_ttft_ms
        record.predicted_tpot_ms = decision.predicted_tpot_ms
        dispatch_ns = round(self.settings.dispatch_ms * NS_PER_MS)
        self.queue.after(dispatch_ns, self._dispatch, (flight, decision))

    # --- the router's waiting line ---------------------------------------------------------------

    def _settled(self, settled: Settled) -> None:
        flight = self._flights.get(int(settled.request_id))
        if flight is not None:
            self._routed(flight, settled.verdict)

    def _hold(self, flight: Flight, error: NoInstanceError) -> None:
        """Nobody can serve now: until somebody can, or for as long as the gateway waits."""
        if self.queue.now_ns >= flight.held_until_ns:
            self._end(flight, RequestEnd.REJECTED, error.reason)
            return
        self._held[flight] = None
        self.queue.at(flight.held_until_ns, self._held_long_enough, flight)

    def _held_long_enough(self, flight: Flight) -> None:
        if flight in self._held:
            del self._held[flight]
            self._route(flight)

    def _cluster_changed(self) -> None:
        held, self._held = self._held, {}
        for flight in held:
            self._route(flight)

    def _dispatch(self, planned: tuple[Flight, RouteDecision]) -> None:
        flight, decision = planned
        if flight.is_over or flight.decision is not decision:
            return
        assert decision.decode is not None
        decode = self._instance(decision.decode)
        if decode is None:
            self._failed(flight, decision.decode.instance_id)
            return
        flight.decode = flight.leg(decode.spec.longest - flight.request.num_prompt)
        if decision.prefill is None:
            decode.submit(flight.decode)
        else:
            decode.reserve(flight.decode)

    def _instance(self, ref: InstanceRef | None) -> SimInstance | None:
        """Who is there; None for another epoch."""
        if ref is None:
            return None
        instance = self.instances.get(ref.instance_id)
        return instance if instance is not None and instance.epoch == ref.epoch else None

    # --- Listener: what instances tell ---------------------------------------------------------

    def reserved(self, sequence: SimSequence) -> None:
        flight = flight_of(sequence)
        assert flight.decision is not None
        assert flight.decision.decode is not None
        prefill = self._instance(flight.decision.prefill)
        if prefill is None:
            self.queue.at(self.queue.now_ns, self._prefill_gone, (flight, flight.decision))
            return
        flight.prefill = flight.leg(flight.record.num_tokens + 1, is_for_peer=True)
        missing = prefill.fetch_prefix(flight.prefill, sequence.num_computed)
        if missing:
            holder = self.instances[flight.decision.decode.instance_id]
            flight.fetch = self.fetches.begin(flight.prefill, missing, holder.spec, prefill)
        else:
            prefill.submit(flight.prefill)

    def sampled(self, sequence: SimSequence) -> None:
        flight = flight_of(sequence)
        record, decision = flight.record, flight.decision
        assert decision is not None
        record.num_tokens = sequence.num_generated
        record.num_cached = max(record.num_cached, sequence.num_cached)
        self._deliver(self._first_token, (flight, decision))
        if not sequence.is_for_peer:
            return
        if flight.decode is None or flight.decode.num_output <= sequence.num_generated:
            self._abort_legs(flight)
            self._deliver(self._finished, (flight, decision))
            return
        self.handovers.begin(flight, decision)

    def second_token(self, sequence: SimSequence, at_ns: int) -> None:
        flight_of(sequence).record.second_ns = at_ns + self._delivery_ns - START_NS

    def finished(self, sequence: SimSequence) -> None:
        flight = flight_of(sequence)
        flight.record.num_tokens = sequence.num_output
        assert flight.decision is not None
        self._deliver(self._finished, (flight, flight.decision))

    def cache_changed(self, instance: AnyInstance, events: list[KvEvent]) -> None:
        self.feed.kv_events(instance, events)

    def before_change(self, instance: AnyInstance) -> None:
        self.feed.before_change(instance)

    def load_changed(self, instance: AnyInstance) -> None:
        self.feed.changed(instance)

    # --- the way back --------------------------------------------------------------------------

    def _deliver(self, arrives: Callable[[_Sent], None], sent: _Sent) -> None:
        """What a step brought, to gateway and client."""
        if self._delivery_ns:
            self.queue.after(self._delivery_ns, arrives, sent)
        else:
            arrives(sent)

    def _first_token(self, sent: _Sent) -> None:
        """Also of an attempt that has failed since: the token was on its way."""
        flight, decision = sent
        if flight.record.end is None and flight.record.first_ns is None:
            flight.record.first_ns = self.since_start_ns
        self._report(decision, Outcome.first_token())

    # --- ends ----------------------------------------------------------------------------------

    def _finished(self, sent: _Sent) -> None:
        flight, decision = sent
        if flight.record.end is not None:
            return
        self._end(flight, RequestEnd.FINISHED)
        record = flight.record
        outcome = Outcome.finished(record.tpot_ms, num_output_tokens=record.num_tokens)
        self._report(decision, outcome)

    def _report(self, decision: RouteDecision, outcome: Outcome) -> None:
        """After what its instances have reported so far."""
        for ref in (decision.prefill, decision.decode):
            if ref is not None:
                self.feed.tell_of(ref.instance_id)
        self.router.report(decision.decision_id, outcome)

    def _cancel(self, flight: Flight) -> None:
        self._given_up(flight, RequestEnd.CANCELLED)

    def _timed_out(self, flight: Flight) -> None:
        self._given_up(flight, RequestEnd.FAILED, "deadline_exceeded")

    def _given_up(self, flight: Flight, end: RequestEnd, reason: str = "") -> None:
        if flight.is_over:
            return
        self._abort_legs(flight)
        self._held.pop(flight, None)
        if flight.decision is not None:
            self._report(flight.decision, Outcome.cancelled())
        else:
            self.router.cancel(flight.request_id)
        self._end(flight, end, reason)

    def _prefill_gone(self, planned: tuple[Flight, RouteDecision]) -> None:
        flight, decision = planned
        if flight.decision is decision and flight.record.end is None:
            assert decision.prefill is not None
            self._failed(flight, decision.prefill.instance_id)

    def _lost_leg(self, flight: Flight, sequence: SimSequence, instance_id: InstanceId) -> None:
        if sequence is flight.decode:
            flight.record.num_tokens = max(flight.record.num_tokens, sequence.num_generated)
        self._failed(flight, instance_id)

    def _failed(self, flight: Flight, instance_id: InstanceId) -> None:
        """An instance died under it: again elsewhere, with the tokens that are out already."""
        if flight.is_over or flight.decision is None:
            return
        self._abort_legs(flight)
        self._report(flight.decision, Outcome.failed(instance_id))
        flight.decision = None
        flight.excluded |= {instance_id}
        if flight.record.num_attempts >= self.settings.max_attempts:
            self._end(flight, RequestEnd.FAILED, "instance_lost")
            return
        wait_ns = round(self.settings.instance_wait_ms * NS_PER_MS)
        flight.held_until_ns = self.queue.now_ns + wait_ns
        self._route(flight)

    def _abort_legs(self, flight: Flight) -> None:
        self.handovers.cancel(flight)
        self.fetches.cancel(flight.fetch)
        decision = flight.decision
        if decision is not None:
            for sequence, ref in (
                (flight.prefill, decision.prefill),
                (flight.decode, decision.decode),
            ):
                instance = self._instance(ref)
                if sequence is not None and instance is not None:
                    instance.abort(sequence)
        flight.prefill = flight.decode = None

    def _end(self, flight: Flight, end: RequestEnd, reason: str = "") -> None:
        record = flight.record
        assert record.end is None, "a request ends once"
        record.end, record.reason, record.end_ns = end, reason, self.since_start_ns
        del self._flights[flight.request.index]
        self.num_open -= 1
        if self.is_done:
            self.queue.stop()
