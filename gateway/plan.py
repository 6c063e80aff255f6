"""What one HTTP request asks for, checked and tokenised: the input of an ``Exchange``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from isthmus.common.ids import HashChain
from isthmus.common.types import FinishReason, SamplingParams, Slo, TokenLogprob

ANONYMOUS = "anonymous"
"""Label of requests without a tenant, where no keys are configured."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """``text`` is what ``echo`` repeats; of token ids it is made only then."""

    text: str
    token_ids: tuple[int, ...]
    hash_chains: tuple[HashChain, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """``prompts`` × ``num_choices`` sequences: index ``prompt * num_choices + k`` in the answer."""

    request_id: str
    model: str
    prompts: tuple[PreparedPrompt, ...]
    num_choices: int
    sampling: SamplingParams
    """Of the first choice of all; each prompt has a ``max_tokens`` of its own."""
    stop_strings: tuple[str, ...]
    arrival_ns: int
    deadline_ns: int
    slo: Slo = field(default_factory=Slo)
    tenant: str = ""
    tenant_label: str = ANONYMOUS
    cache_salt: str = ""
    session: str = ""
    is_streamed: bool = False
    is_echo: bool = False
    has_output: bool = True
    """False when only the echoed prompt is wanted (``max_tokens`` 0)."""

    def sampling_of(self, prompt: PreparedPrompt, k: int) -> SamplingParams:
        """Choice ``k`` of a prompt draws from its own stream: seed + k."""
        if k == 0 and prompt.max_tokens == self.sampling.max_tokens:
            return self.sampling
        return replace(
            self.sampling,
            max_tokens=prompt.max_tokens,
            seed=(self.sampling.seed + k) % 2**64,
            prompt_logprobs=self.sampling.prompt_logprobs if k == 0 else None,
        )


@dataclass(slots=True)
class ChoiceDelta:
    """What a choice has gained since it was last looked at."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token that the client asked for."""
