"""The instance's own series and the HTTP endpoint that serves them.

Only series of instances are exported here, each with its role and instance: the module that
declares them also declares the gateway's, which would appear as zeros under a worker's name.
Gauges are read when they are scraped, so that an idle instance does no work for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server

from isthmus.common import metrics
from isthmus.common.addresses import join_address
from isthmus.common.cluster import InstanceState, Role
from isthmus.common.ids import InstanceId
from isthmus.common.types import InstanceRef
from isthmus.engine.core import EngineCore
from isthmus.engine.types import EngineLoad, StepOutput
from isthmus.kvtransfer.observer import Side
from isthmus.kvtransfer.receive_session import Ignored, ReceiveState
from isthmus.kvtransfer.send_session import SendState

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_EXPORTED = (
    metrics.KV_BLOCKS,
    metrics.STEP,
    metrics.STEP_TOKENS,
    metrics.RUNNING_SEQS,
    metrics.WAITING_SEQS,
    metrics.COMPUTED_PROMPT_TOKENS,
    metrics.PREEMPTIONS,
    metrics.PACED_STEPS,
    metrics.TRANSFERS,
    metrics.TRANSFERS_OPEN,
    metrics.TRANSFER_BYTES,
    metrics.KV_EXPOSED,
    metrics.LINK_RATE,
    metrics.TRANSFERS_HOPELESS,
    metrics.CORRUPT_BLOCKS,
    metrics.PREFILL_FAILURES,
    metrics.CANARY,
    metrics.CANARY_MISMATCH,
    metrics.CANARY_TOKENS,
    metrics.NOTIFICATIONS_IGNORED,
    metrics.PREFIX_FETCHES,
    metrics.PREFIX_FETCHED_TOKENS,
    metrics.HOLD_EXPIRED,
    metrics.ABORTED,
    metrics.INSTANCE_UP,
)

_SESSION_STATES = (
    *(("send", state.value) for state in SendState),
    *(("receive", state.value) for state in ReceiveState),
)

_BLOCK_STATES: Mapping[str, Callable[[EngineLoad], int]] = {
    "used": lambda load: (
        load.num_blocks - load.free_blocks - load.held_blocks - load.quarantined_blocks
    ),
    "held": lambda load: load.held_blocks,
    "cached": lambda load: load.cached_blocks,
    "free": lambda load: load.free_blocks,
    "quarantined": lambda load: load.quarantined_blocks,
}


class InstanceMetrics:
    """Observations of one instance. Methods may be called from the event loop only."""

    def __init__(
        self,
        role: Role,
        me: InstanceRef,
        engine: EngineCore,
    ) -> None:
        self._labels = (role.value, me.instance_id)
        self._up = metrics.INSTANCE_UP.labels(*self._labels, str(me.epoch))
        self._up.set(0)
        self._step = metrics.STEP.labels(*self._labels)
        self._prefill_tokens = metrics.STEP_TOKENS.labels(*self._labels, "prefill")
        self._decode_tokens = metrics.STEP_TOKENS.labels(*self._labels, "decode")
        self._computed = metrics.COMPUTED_PROMPT_TOKENS.labels(*self._labels)
        self._preempted = metrics.PREEMPTIONS.labels(*self._labels)
        self._paced = metrics.PACED_STEPS.labels(*self._labels)
        self._aborted = metrics.ABORTED.labels(*self._labels)
        self._exposed = metrics.KV_EXPOSED.labels(*self._labels)
        self._expired = metrics.HOLD_EXPIRED.labels(*self._labels)
        self._links: dict[InstanceId, tuple[str, Gauge]] = {}
        self._bind_gauges(engine)

    def _bind_gauges(self, engine: EngineCore) -> None:
        for state, read in _BLOCK_STATES.items():
            _follow(
                metrics.KV_BLOCKS.labels(*self._labels, state),
                lambda read=read: read(engine.load()),  # type: ignore[misc]
            )
        _follow(metrics.RUNNING_SEQS.labels(*self._labels), lambda: engine.load().running_seqs)
        _follow(metrics.WAITING_SEQS.labels(*self._labels), lambda: engine.load().waiting_seqs)

    def observe_step(self, output: StepOutput) -> None:
        self._step.observe((output.ended_ns - output.started_ns) / 1e9)
        if output.num_prefill_tokens:
            self._prefill_tokens.observe(output.num_prefill_tokens)
            self._computed.inc(output.num_prefill_tokens)
        if output.num_decode_tokens:
            self._decode_tokens.observe(output.num_decode_tokens)
        if output.num_preempted:
            self._preempted.inc(output.num_preempted)
        if output.is_paced:
            self._paced.inc()

    def state_changed(self, state: InstanceState) -> None:
        self._up.set(1 if state is InstanceState.READY else 0)

    def aborted(self) -> None:
        self._aborted.inc()

    def hold_expired(self) -> None:
        self._expired.inc()

    def prefix_fetched(self, num_tokens: int) -> None:
        metrics.PREFIX_FETCHES.labels(*self._labels, "arrived").inc()
        metrics.PREFIX_FETCHED_TOKENS.labels(*self._labels).inc(num_tokens)

    def prefix_given_up(self) -> None:
        metrics.PREFIX_FETCHES.labels(*self._labels, "given_up").inc()

    def prefill_failed(self, policy: str, remedy: str, reason: str) -> None:
        """``policy``: what the request's class asks for; ``remedy``: what was done; ``reason``: the
        error's code."""
        metrics.PREFILL_FAILURES.labels(*self._labels, policy, remedy, reason).inc()

    def canary(self, result: str) -> None:
        metrics.CANARY.labels(*self._labels, result).inc()

    def canary_mismatch(self, prefill: InstanceId) -> None:
        metrics.CANARY_MISMATCH.labels(*self._labels, prefill).inc()

    def canary_computed(self, num_prompt_tokens: int) -> None:
        metrics.CANARY_TOKENS.labels(*self._labels).inc(num_prompt_tokens)

    def kv_ready(self, exposed_s: float) -> None:
        """``exposed_s``: from the end of the last prefill step until the KV was complete."""
        self._exposed.observe(exposed_s)

    def bind_sessions(self, sessions_by_state: Callable[[], dict[str, int]]) -> None:
        """Gauges of open sessions; the keys are ``side:state``."""
        for side, state in _SESSION_STATES:
            gauge = metrics.TRANSFERS_OPEN.labels(*self._labels, side, state)
            _follow(gauge, lambda key=f"{side}:{state}": sessions_by_state().get(key, 0))  # type: ignore[misc]

    # --- TransferObserver ------------------------------------------------------------------------

    def session_ended(
        self,
        side: Side,
        state: str,
        connector: str,
        num_bytes: int,
        seconds: float,  # noqa: ARG002 (the exposed part is what matters: see kv_ready)
    ) -> None:
        metrics.TRANSFERS.labels(*self._labels, side, state, connector).inc()
        metrics.TRANSFER_BYTES.labels(*self._labels, side, connector).inc(num_bytes)

    def notification_ignored(self, reason: Ignored) -> None:
        metrics.NOTIFICATIONS_IGNORED.labels(*self._labels, reason.value).inc()

    def links_measured(
        self, bytes_per_s: Mapping[InstanceId, float], connectors: Mapping[InstanceId, str]
    ) -> None:
        for peer, (connector, _) in list(self._links.items()):
            if peer not in bytes_per_s or connectors.get(peer) != connector:
                del self._links[peer]
                metrics.LINK_RATE.remove(*self._labels, peer, connector)
        for peer, rate in bytes_per_s.items():
            if peer not in self._links:
                connector = connectors.get(peer, "none")
                gauge = metrics.LINK_RATE.labels(*self._labels, peer, connector)
                self._links[peer] = connector, gauge
            self._links[peer][1].set(rate)

    def hopeless(self, connector: str) -> None:
        metrics.TRANSFERS_HOPELESS.labels(*self._labels, connector).inc()

    def blocks_corrupt(self, num_blocks: int, connector: str) -> None:
        metrics.CORRUPT_BLOCKS.labels(*self._labels, connector).inc(num_blocks)


def _follow(gauge: Gauge, read: Callable[[], float]) -> None:
    gauge.set_function(read)


class MetricsServer:
    """``GET /metrics`` on a thread of its own."""

    def __init__(self, host: str) -> None:
        registry = CollectorRegistry()
        for metric in _EXPORTED:
            registry.register(metric)
        ProcessCollector(registry=registry)
        server: WSGIServer
        thread: Thread
        server, thread = start_http_server(0, addr=host, registry=registry)
        self._server = server
        self._thread = thread
        self.address = join_address(host, server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)
