"""What one process knows of an instance: its record in the registry and its load."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.state_machine import Transitions
from isthmus.common.types import InstanceRef


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class InstanceState(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


_LOST = frozenset({InstanceState.LOST})
INSTANCE_TRANSITIONS: Transitions[InstanceState] = Transitions(
    {
        InstanceState.STARTING: frozenset({InstanceState.READY, InstanceState.STOPPED}) | _LOST,
        InstanceState.READY: frozenset({InstanceState.DRAINING}) | _LOST,
        InstanceState.DRAINING: frozenset({InstanceState.STOPPED}) | _LOST,
        InstanceState.STOPPED: frozenset(),
        InstanceState.LOST: frozenset(),
    }
)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Closed-form step times in milliseconds, fitted at boot and online.

    prefill(u, c) = ``prefill_base + prefill_token·u + prefill_pair·(u·c + u²/2)`` for u uncached
    tokens after c cached ones; a decode step of b sequences that attend to K tokens in total takes
    ``decode_base + decode_seq·b + decode_context·K``. The form is DistServe's (OSDI 2024, §4), as
    is its second piece: from ``large_batch`` sequences on (0 = never) the ``large_…`` coefficients
    take the place of the decode ones.
    """

    prefill_base: float = 5.0
    prefill_token: float = 1.0
    prefill_pair: float = 0.0
    decode_base: float = 20.0
    decode_seq: float = 1.0
    decode_context: float = 0.0
    large_batch: int = 0
    large_base: float = 0.0
    large_seq: float = 0.0
    large_context: float = 0.0

    def prefill_ms(self, uncached: int, cached: int = 0) -> float:
        pairs = uncached * cached + uncached * uncached / 2
        return self.prefill_base + self.prefill_token * uncached + self.prefill_pair * pairs

    def decode_step_ms(self, num_seqs: int, context_tokens: int) -> float:
        if 0 < self.large_batch <= num_seqs:
            return self.large_base + self.large_seq * num_seqs + self.large_context * context_tokens
        return self.decode_base + self.decode_seq * num_seqs + self.decode_context * context_tokens


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    instance_id: InstanceId
    role: Role
    state: InstanceState
    epoch: int
    address: str  # gRPC, host:port
    metrics_address: str  # HTTP /metrics, host:port
    model: str
    model_path: str
    kv_layout: KvLayout
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    connector: str
    latency: LatencyModel = field(default_factory=LatencyModel)
    node: str = ""
    pid: int = 0
    version: str = ""
    rank_pids: tuple[int, ...] = ()  # of all ranks, the leader's first
    zone: str = ""  # rack, rail group or zone: KV travels faster inside one
    fetch_min_tokens: int = 0
    """A prefill instance asks the decode instance for so many tokens of a prompt's KV, or more,
    that it lacks and the other has; 0 = never."""

    @property
    def ref(self) -> InstanceRef:
        return InstanceRef(self.instance_id, self.epoch, self.address)

    @property
    def block_size(self) -> int:
        return self.kv_layout.block_size


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over the steps that an instance has finished in this epoch: what two reports differ by,
    divided by the steps between them, is their mean step, which a linear model must explain.

    ``prefill_…``: steps that computed prompt tokens, u of them after c: Σ u·c + u²/2 are the
    ``pairs``; ``beside_…``: what decoded in the same steps. ``decode_…``: steps that only decoded.
    """

    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    beside_seqs: int = 0
    beside_context: int = 0
    prefill_ms: float = 0.0
    decode_steps: int = 0
    decode_seqs: int = 0
    decode_context: int = 0
    decode_ms: float = 0.0


NO_STEPS = StepTotals()


@dataclass(frozen=True, slots=True)
class LinkRate:
    """How fast KV was measured to go from the instance that reports it to another."""

    target_id: InstanceId
    bytes_per_s: float


@dataclass(slots=True)
class LoadReport:
    """A worker's own view of its load; ``seq`` grows with each report of one epoch.

    Whoever has one changes nothing of it. That it is not frozen is for speed: every instance makes
    one, and every router two, ten times a second, and a frozen one of so many fields takes three
    times as long to make.
    """

    instance_id: InstanceId
    epoch: int
    seq: int
    at_ns: int
    waiting_seqs: int = 0
    waiting_tokens: int = 0  # prompt tokens accepted but not computed
    oldest_wait_ms: float = 0.0
    running_seqs: int = 0
    running_context_tokens: int = 0
    num_blocks: int = 0
    free_blocks: int = (
        0  # neither referenced nor needed: cached but unreferenced ones count as free
    )
    held_blocks: int = 0  # kept for a transfer
    cached_blocks: int = 0
    inflight_transfer_bytes: int = 0
    step_ms: float = 0.0  # EWMA
    steps: int = 0  # finished steps: a progress check
    totals: StepTotals = NO_STEPS  # measured steps; none = not measured
    links: tuple[LinkRate, ...] = ()  # to where it has sent enough to tell
    prompt_seqs: int | None = None
    """How many of the waiting and running ones have no token of this instance yet. None = an
    instance of an older version, which does not say."""
