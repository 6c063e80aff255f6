"""When a sequence is over. Prefill and decode instances apply the same rules to the same counts.

``min_tokens`` and ``max_tokens`` count outputs from the prompt's end, those delivered before a
resume included. Before ``min_tokens`` outputs a stop token cannot be drawn at all: the sampler
masks it. Stop *strings* are the gateway's business.
"""

from __future__ import annotations

from isthmus.common.types import FinishReason, SamplingParams
from isthmus.engine.sequence import Sequence


def must_not_stop_yet(sampling: SamplingParams, output_index: int) -> bool:
    """Whether stop tokens are masked for the output token of this index."""
    return output_index < sampling.min_tokens


def find_finish_reason(sequence: Sequence) -> FinishReason | None:
    """Judges the sequence by its last token and its length; None = it goes on."""
    stop_token_ids = sequence.request.sampling.stop_token_ids
    has_outputs = sequence.num_tokens > sequence.request.num_prompt_tokens
    if stop_token_ids and has_outputs and sequence.last_token_id in stop_token_ids:
        return FinishReason.STOP
    if sequence.num_tokens >= sequence.max_num_tokens:
        return FinishReason.LENGTH
    return None
