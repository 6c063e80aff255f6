"""The router's picture of the cluster: who is there, how loaded, and whether it may be chosen.

Two sources feed it and may disagree. The registry says who is registered (a lease); the load stream
says who answers. An instance is LOST only when both are gone; a broken stream alone makes it
suspect, which excludes it at once and ends with its next report; a vanished lease alone changes
nothing, since the registry may have restarted. A newer epoch is a new instance: breaker, load and
corrections start clean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import InstanceInfo, InstanceState, LatencyModel, LoadReport, Role
from isthmus.common.ids import InstanceId
from isthmus.common.learned_latency import LearnedLatency
from isthmus.common.types import InstanceRef
from isthmus.router.breaker import Breaker
from isthmus.router.pairing import CompatKey, compat_key, fed_keys, pairing_problems

MAX_LOST = 64
_READY = InstanceState.READY  # looked up for every instance and decision
FADES_AFTER_MS, FADE_MS = 5_000.0, 10_000.0
PROMPT_MEMORY_MS = 4_000.0
LEAST_HELD_UP = 0.01  # of its time
"""How long prompts that were computed beside decodes count for what those are held up."""


@dataclass(slots=True)
class InstanceView:
    """One instance at one epoch."""

    info: InstanceInfo
    ref: InstanceRef
    breaker: Breaker
    key: CompatKey
    kind: tuple[Role, CompatKey]  # as it came: those who are alike have the same partners
    fed_keys: tuple[CompatKey, ...]  # of decode instances that are there
    block_size: int
    longest_prompt: int  # that fits with one output token
    token_bytes: int  # KV of one token
    learned: LearnedLatency
    load: LoadReport | None = None
    load_at_ns: int = 0  # when the report came, by this process's monotonic clock
    reported_work_ms: float = 0.0  # prefill work that the report speaks of
    is_registered: bool = True
    is_suspect: bool = False
    prefill_factor: float = 1.0  # measured / predicted
    decode_factor: float = 1.0
    last_chosen: int = 0
    measured_ns: int = 0  # when a request that ran here last told how long it took
    prompt_ms: float = 0.0  # prefill work sent to an instance that decodes, decaying
    prompt_at_ns: int = 0
    problem: str = ""

    @classmethod
    def of(cls, info: InstanceInfo, breaker: Breaker) -> InstanceView:
        longest = min(info.max_model_len, info.num_blocks * info.block_size) - 1
        token_bytes = info.kv_layout.instance_token_bytes
        learned = LearnedLatency(info.latency)
        key = compat_key(info)
        kind = info.role, key
        return cls(
            info, info.ref, breaker, key, kind, (), info.block_size, longest, token_bytes, learned
        )

    @property
    def instance_id(self) -> InstanceId:
        return self.info.instance_id

    @property
    def latency(self) -> LatencyModel:
        """As fitted at boot and corrected by measured steps since."""
        return self.learned.model

    def is_usable(self, now_ns: int) -> bool:
        """May be chosen now, whatever is asked: who counts as ready to the router and to those who
        wait for it. ``admission.filter_reason`` and a snapshot name what is in the way."""
        return (
            self.info.state is _READY
            and not self.is_suspect
            and (self.breaker.is_closed or self.breaker.allows(now_ns))
        )

    def prefill_ms(self, uncached: int, cached: int) -> float:
        """Of a prompt in steps of its own, by the model alone."""
        model = self.learned.model
        return (
            model.prefill_base * -(-uncached // self.info.max_num_batched_tokens)
            + model.prefill_token * uncached
            + model.prefill_pair * uncached * (cached + uncached / 2)
        )

    def fetch_min_tokens(self, key: CompatKey) -> float:
        """Tokens that a decode instance with ``key`` has and this one lacks, from which on it
        fetches their KV; infinite where it never does."""
        least, is_alike = self.info.fetch_min_tokens, self.key[-1] == key[-1]  # of one dtype
        return least if least and is_alike else float("inf")

    def take_prompt(self, prefill_ms: float, now_ns: int) -> None:
        """A prompt was sent here to be computed beside decodes, which it will hold up."""
        age_ms = (now_ns - self.prompt_at_ns) / NS_PER_MS
        self.prompt_ms = self.prompt_ms * exp(-age_ms / PROMPT_MEMORY_MS) + prefill_ms
        self.prompt_at_ns = now_ns

    def is_held_up(self, now_ns: int) -> bool:
        """Whether prompts have taken time from its decodes lately."""
        age_ms = (now_ns - self.prompt_at_ns) / NS_PER_MS
        return self.prompt_ms * exp(-age_ms / PROMPT_MEMORY_MS) > LEAST_HELD_UP * PROMPT_MEMORY_MS

    def faded(self, factor: float, now_ns: int) -> float:
        """A correction without news fades: who is shunned for it could never show it wrong."""
        silent_ms = (now_ns - self.measured_ns) / NS_PER_MS - FADES_AFTER_MS
        if silent_ms <= 0.0 or factor == 1.0:
            return factor
        return 1.0 + (factor - 1.0) * exp(-silent_ms / FADE_MS)

    def load_age_ms(self, now_ns: int) -> float:
        return (now_ns - self.load_at_ns) / NS_PER_MS if self.load is not None else float("inf")


@dataclass(frozen=True, slots=True)
class LostInstance:
    info: InstanceInfo
    reason: str
    at_ns: int


@dataclass(slots=True)
class ClusterView:
    """Owned by the router; changed by the feed through it. One thread."""

    max_failures: int
    open_ms: int
    is_registry_connected: bool = False
    num_changes: int = 0
    """Grows whenever somebody comes, goes or says something new of himself: what was derived from
    who is there, and from their records, is then to be derived again."""
    views: dict[InstanceId, InstanceView] = field(default_factory=dict)
    lost: dict[InstanceId, LostInstance] = field(default_factory=dict)
    _alike: dict[tuple[Role, CompatKey], dict[InstanceId, None]] = field(default_factory=dict)
    _has_problems: bool = False

    def __iter__(self) -> Iterator[InstanceView]:
        return iter(self.views.values())

    def get(self, instance_id: InstanceId) -> InstanceView | None:
        return self.views.get(instance_id)

    def at_epoch(self, instance_id: InstanceId, epoch: int) -> InstanceView | None:
        view = self.views.get(instance_id)
        return view if view is not None and view.info.epoch == epoch else None

    def by_role(self, *roles: Role) -> list[InstanceView]:
        return [view for view in self.views.values() if view.info.role in roles]

    def upsert(self, info: InstanceInfo) -> bool:
        """Takes a record from the registry; True when it begins a new instance epoch."""
        view = self.views.get(info.instance_id)
        if view is not None and info.epoch < view.info.epoch:
            return False
        if view is not None and info.epoch == view.info.epoch:
            # Its state, and what was measured; all else is fixed for an epoch.
            view.info, view.ref = info, info.ref
            view.is_registered = True
            if info.latency != view.learned.boot:
                view.learned = LearnedLatency(info.latency)
            is_new = False
        else:
            breaker = Breaker(self.max_failures, self.open_ms)
            self.views[info.instance_id] = InstanceView.of(info, breaker)
            self.lost.pop(info.instance_id, None)
            if view is not None:
                self._leave(view)
            self._join(self.views[info.instance_id])
            is_new = True
        self.num_changes += 1
        return is_new

    def remove(self, instance_id: InstanceId, reason: str, now_ns: int) -> None:
        """The instance is LOST, or stopped."""
        view = self.views.pop(instance_id, None)
        if view is None:
            return
        self.num_changes += 1
        self.lost[instance_id] = LostInstance(view.info, reason, now_ns)
        while len(self.lost) > MAX_LOST:
            del self.lost[next(iter(self.lost))]
        self._leave(view)

    def take_report(self, report: LoadReport, now_ns: int) -> InstanceView | None:
        """None when the report is of another epoch or older than the last one."""
        view = self.views.get(report.instance_id)
        if view is None or view.info.epoch != report.epoch:
            return None
        before, learned = view.load, view.learned
        if before is not None and report.seq <= before.seq:
            return None
        view.load = report
        view.load_at_ns = now_ns
        if report.totals is not learned.seen:
            learned.observe(report.totals)
        view.reported_work_ms = reported_work_ms(learned.model, report)
        view.is_suspect = False
        return view

    def _join(self, view: InstanceView) -> None:
        """One more of a kind that has its partners finds the same ones, and is nobody's news."""
        alike = self._alike.setdefault(view.kind, {})
        twin = next(iter(alike), None)
        alike[view.instance_id] = None
        if twin is None or self._has_problems:
            self._find_partners()
        else:
            view.fed_keys = self.views[twin].fed_keys

    def _leave(self, view: InstanceView) -> None:
        kind = view.kind
        del self._alike[kind][view.instance_id]
        if not self._alike[kind]:
            del self._alike[kind]
        if self._has_problems or kind not in self._alike:
            self._find_partners()

    def _find_partners(self) -> None:
        kept = {view.key for view in self.views.values() if view.info.role is not Role.PREFILL}
        problems = pairing_problems(view.info for view in self.views.values())
        self._has_problems = bool(problems)
        for view in self.views.values():
            view.problem = problems.get(view.instance_id, "")
            if view.info.role is Role.PREFILL:
                view.fed_keys = fed_keys(view.info, kept)


def reported_work_ms(latency: LatencyModel, load: LoadReport) -> float:
    """Work of the waiting prompts, as if they were equally long, and half a running step."""
    running_ms = load.step_ms / 2 if load.running_seqs else 0.0
    if not load.waiting_tokens:
        return running_ms
    num_seqs = max(1, load.waiting_seqs)
    return running_ms + num_seqs * latency.prefill_ms(load.waiting_tokens // num_seqs)
