"""What the engine says to the worker around it. The worker owns I/O, the engine owns KV blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from isthmus.common.cluster import StepTotals
from isthmus.common.errors import IsthmusError
from isthmus.common.ids import BlockId, RequestId
from isthmus.common.layer_progress import LayerProgress
from isthmus.common.types import FinishReason, TokenLogprob


class SequenceMode(Enum):
    FULL = "full"  # prompt and outputs here
    PRIVATE = "private"  # as FULL, but neither finds nor leaves anything in the prefix cache
    PREFILL_ONLY = "prefill_only"  # prompt and first token; blocks stay HELD for the transfer


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks of a decode instance set aside for a prompt whose KV will arrive from elsewhere.

    ::

        block table   cached_block_ids (own prefix hits) | block_ids (to be written by the peer)
                      num_cached_tokens = len(cached_block_ids) * block_size
    """

    request_id: RequestId
    num_cached_tokens: int
    cached_block_ids: tuple[BlockId, ...]
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one step did to one sequence."""

    request_id: RequestId
    num_computed_tokens: int  # KV of the first this-many tokens is in the store and final
    num_cached_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first token, when asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it (also last of token_ids)
    error: IsthmusError | None = None
    scheduled_ns: int = 0  # unix time at which the sequence's first step began


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """A step that has begun, as far as peers wait for what it computes.

    Where ``progress`` says that a layer is final, and that of all earlier steps of a sequence does,
    KV of that layer of its first ``num_tokens[request]`` tokens is in the store; the sequences are
    PREFILL_ONLY. Nothing else follows from a launch: the step may fail, or never run.
    """

    step_id: int
    num_tokens: Mapping[RequestId, int]
    progress: LayerProgress


@dataclass(frozen=True, slots=True)
class StepOutput:
    step_id: int
    updates: tuple[SequenceUpdate, ...]
    started_ns: int
    ended_ns: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preempted: int = 0
    is_paced: bool = False  # prompts were cut short for the TPOT targets of decodes


@dataclass(frozen=True, slots=True)
class EngineLoad:
    waiting_seqs: int
    waiting_tokens: int
    oldest_wait_ms: float
    running_seqs: int
    running_context_tokens: int
    prompt_seqs: int  # of both kinds: those without a token of this engine
    num_blocks: int
    free_blocks: int  # unreferenced, cached ones included
    held_blocks: int
    cached_blocks: int
    quarantined_blocks: int
    steps: int
    step_ms: float
    totals: StepTotals
