"""What a request must satisfy before it may share a batch with others.

An id outside the vocabulary or an impossible length would make the forward pass of a whole step
fail, so it is refused here, where it harms nobody else.
"""

from __future__ import annotations

import math

from isthmus.common.errors import ContextLengthError, InvalidRequestError
from isthmus.common.types import REPETITION_PENALTY_RANGE, Request, SamplingParams


def check_request(request: Request, max_model_len: int, vocab_size: int) -> None:
    """Raises ContextLengthError or InvalidRequestError."""
    num_tokens = len(request.token_ids)
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            f"{num_tokens} prompt tokens leave no room for an output: a sequence holds at most "
            f"{max_model_len} tokens here",
            stage="admit",
        )
    sampling = request.sampling
    if request.num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens", stage="admit")
    if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab_size:
        raise InvalidRequestError(
            f"prompt tokens must be in [0, {vocab_size})", stage="admit", param="prompt"
        )
    if any(not 0 <= token_id < vocab_size for token_id, _ in sampling.logit_bias):
        raise InvalidRequestError(
            f"logit_bias tokens must be in [0, {vocab_size})", stage="admit", param="logit_bias"
        )
    if sampling.max_tokens <= request.num_resumed_tokens:
        raise InvalidRequestError(
            f"max_tokens {sampling.max_tokens} is used up by {request.num_resumed_tokens} "
            "delivered tokens",
            stage="admit",
            param="max_tokens",
        )
    _check_numbers(sampling)


def _check_numbers(sampling: SamplingParams) -> None:
    """A NaN fails every comparison, so each test states what is allowed."""
    least, most = REPETITION_PENALTY_RANGE
    if not 0 <= sampling.temperature < math.inf:
        message, param = "temperature must be a finite number from 0 on", "temperature"
    elif not least <= sampling.repetition_penalty <= most:
        message, param = f"repetition_penalty must be in [{least}, {most}]", "repetition_penalty"
    elif not all(math.isfinite(bias) for _, bias in sampling.logit_bias):
        message, param = "logit_bias must be finite", "logit_bias"
    elif not math.isfinite(sampling.presence_penalty + sampling.frequency_penalty):
        message, param = "penalties must be finite", "presence_penalty"
    else:
        return
    raise InvalidRequestError(message, stage="admit", param=param)
