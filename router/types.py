"""What goes into the router and comes back to it. Block hashes and lengths, never token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from isthmus.common.clock import NS_PER_MS
from isthmus.common.ids import HashChain, InstanceId, RequestId
from isthmus.common.timeline import Timeline
from isthmus.common.types import Slo


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """``hash_chains``: one of the prompt's full blocks for each block size in the cluster.

    ``arrival_ns`` is when the gateway had read the request, which its targets count from, and
    ``deadline_ns`` when it ends whatever has become of it: unix time, 0 = not known.
    """

    request_id: RequestId
    model: str
    num_prompt_tokens: int
    hash_chains: tuple[HashChain, ...] = ()
    slo: Slo = field(default_factory=Slo)
    tenant: str = ""
    session: str = ""  # of its tenant: its turns share a prefix, mostly
    max_output_tokens: int = 16
    arrival_ns: int = 0
    deadline_ns: int = 0
    exclude: frozenset[InstanceId] = frozenset()
    prefer_decode: InstanceId | None = None
    needs_whole_prompt: bool = False  # every prompt position must be computed (prompt logprobs)
    held_for: str = ""  # why it had to wait in the router, as one word
    is_bound_by_end: bool = False  # its TTFT target is what its E2E target leaves for it

    def elapsed_ms(self, unix_ns: int) -> float:
        """From its arrival until then; 0 where that is not known."""
        if not self.arrival_ns:
            return 0.0
        return max(0.0, (unix_ns - self.arrival_ns) / NS_PER_MS)


class OutcomeKind(Enum):
    PREFILL_FAILED = "prefill_failed"  # the request goes on without that instance
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    CANCELLED = "cancelled"  # the client's doing: blames nobody
    REFUSED = "refused"  # an instance was full or draining: it is well, but not now
    FAILED = "failed"

    @property
    def is_end(self) -> bool:
        """Whether it ends the decision's reservation."""
        return self not in (OutcomeKind.PREFILL_FAILED, OutcomeKind.FIRST_TOKEN)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a decision. PREFILL_FAILED and FIRST_TOKEN are on the way: all other kinds end
    its reservation."""

    kind: OutcomeKind
    failed_instance: InstanceId | None = None
    tpot_ms: float | None = None
    timeline: Timeline | None = None  # for explanations
    num_output_tokens: int = 0  # of a FINISHED one; 0 = not told

    @classmethod
    def prefill_failed(cls, instance_id: InstanceId) -> Outcome:
        """Another attempt follows, or the decode instance computes the prompt itself; the client
        notices nothing but the time it takes."""
        return cls(OutcomeKind.PREFILL_FAILED, instance_id)

    @classmethod
    def first_token(cls) -> Outcome:
        return cls(OutcomeKind.FIRST_TOKEN)

    @classmethod
    def finished(
        cls,
        tpot_ms: float | None = None,
        timeline: Timeline | None = None,
        num_output_tokens: int = 0,
    ) -> Outcome:
        return cls(OutcomeKind.FINISHED, None, tpot_ms, timeline, num_output_tokens)

    @classmethod
    def cancelled(cls) -> Outcome:
        return cls(OutcomeKind.CANCELLED)

    @classmethod
    def refused(cls) -> Outcome:
        return cls(OutcomeKind.REFUSED)

    @classmethod
    def failed(cls, instance_id: InstanceId | None) -> Outcome:
        """``instance_id`` None when nobody is to blame (a deadline, say)."""
        return cls(OutcomeKind.FAILED, instance_id)
