"""The dictionary of the system: what a client asked for and what it gets back. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from isthmus.common.ids import DecisionId, InstanceId, RequestId

# Beyond it, a logit times or over the penalty may leave the range of float32.
REPETITION_PENALTY_RANGE = (0.01, 100.0)


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    ``temperature`` 0 means greedy. ``top_k`` 0 and ``top_p`` 1 mean "off", as does ``min_p`` 0.
    ``logprobs`` is None for none, else how many alternatives to report beside the chosen token.
    ``prompt_logprobs`` likewise, for every prompt position after the first (it makes the engine
    compute the whole prompt, so the prefix cache is not used). ``stop_token_ids`` includes the
    model's own end-of-sequence ids unless ``ignore_eos`` was asked for: the gateway decides.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


class Remedy(Enum):
    """What a decode instance does about a prompt that failed elsewhere."""

    FAIL = "fail"
    REPREFILL = "reprefill"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one class of service, milliseconds; None = no target.

    ``quantile`` is the share of the class's requests that shall meet both; ``weight`` what one of
    them counts beside those of other classes. A strict request that cannot meet its targets is
    refused, any other is served when there is slack. ``on_failure``: None = as the decode
    instance is configured (``transfer.on_failure``).
    """

    class_name: str = "default"
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    quantile: float = 0.9
    weight: float = 1.0
    is_strict: bool = False
    on_failure: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. Immutable; ``deadline_ns`` is unix time in nanoseconds.

    ::

        token_ids   prompt … | outputs already delivered (resume only) | next token is sampled here
                             └────── num_resumed_tokens ──────┘

    When a stream is resumed on another instance its delivered outputs are the tail of
    ``token_ids``. Sampling positions, penalties, ``min_tokens`` and ``max_tokens`` still count
    from the prompt's end, and TPOT from ``first_token_ns``: unix time when the first output was
    there, None while there is none.
    """

    request_id: RequestId
    model: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_ns: int
    deadline_ns: int
    slo: Slo = field(default_factory=Slo)
    tenant: str = ""
    cache_salt: str = ""
    num_resumed_tokens: int = 0
    first_token_ns: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt, without resumed outputs."""
        return len(self.token_ids) - self.num_resumed_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of the token at one position, and of the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 0 = most likely
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that came from a prefix cache, not from a transfer


class RouteAction(Enum):
    ADMIT = "admit"
    QUEUE = "queue"
    DEGRADE = "degrade"  # best effort: served, though a target cannot be met


class LocalPrefillReason(Enum):
    """Why a decode instance computed a prompt itself. NONE = it did not."""

    NONE = "none"
    MIXED_ROLE = "mixed_role"
    SHORT_PROMPT = "short_prompt"
    PREFIX_CACHED = "prefix_cached"
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    PREFILL_FAILED = "prefill_failed"
    POLICY = "policy"


@dataclass(frozen=True, slots=True)
class InstanceRef:
    """An instance as it was at one epoch: what a ticket or decision points at."""

    instance_id: InstanceId
    epoch: int
    address: str  # host:port of its gRPC server


@dataclass(frozen=True, slots=True)
class RouteDecision:
    decision_id: DecisionId
    request_id: RequestId
    action: RouteAction
    decode: InstanceRef | None
    prefill: InstanceRef | None  # None with a decode instance = local prefill there
    alternate: InstanceRef | None = None  # to ask when ``prefill`` fails
    local_reason: LocalPrefillReason = LocalPrefillReason.NONE
    cached_tokens: int = 0  # predicted prefix hit where the prompt is computed
    predicted_ttft_ms: float = 0.0
    predicted_tpot_ms: float = 0.0
    policy: str = ""
    reason: str = ""
    expires_ns: int = 0
