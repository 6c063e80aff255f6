"""The engine's record of one request.

::

    token_ids   prompt | outputs delivered before a resume | outputs of this engine
                └───────────── request.token_ids ─────────┘
    steps       num_computed_tokens | num_tokens_in_flight | num_schedulable_tokens
                └ entered           └ planned, not entered └ the next step may run them
    tokens      num_tokens known | num_unknown_tokens, sampled by steps in flight

There are no phases: computed tokens chase the tokens that there are, many a step while the prompt
is computed (or recomputed after a preemption), one a step afterwards. A step is planned before the
one in flight has told its token, so counts may be ahead of what is known: by one token at most.
"""

from __future__ import annotations

import sys
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from isthmus.common.hashing import child_hash
from isthmus.common.ids import BlockHash, RequestId
from isthmus.common.state_machine import Transitions
from isthmus.common.types import FinishReason, Request, SamplingParams, TokenLogprob
from isthmus.engine.block_table import BlockTable
from isthmus.engine.types import SequenceMode


class SeqStatus(Enum):
    WAITING = "waiting"  # owns no blocks, or the KV a peer computed
    RUNNING = "running"  # owns blocks; the scheduler gives it tokens
    PREEMPTED = "preempted"  # lost its blocks, keeps its tokens
    HELD = "held"  # computes no more; its blocks stay for a transfer
    FINISHED = "finished"


SEQ_TRANSITIONS: Transitions[SeqStatus] = Transitions(
    {
        SeqStatus.WAITING: frozenset({SeqStatus.RUNNING, SeqStatus.PREEMPTED, SeqStatus.FINISHED}),
        SeqStatus.RUNNING: frozenset({SeqStatus.PREEMPTED, SeqStatus.HELD, SeqStatus.FINISHED}),
        SeqStatus.PREEMPTED: frozenset({SeqStatus.RUNNING, SeqStatus.FINISHED}),
        SeqStatus.HELD: frozenset({SeqStatus.FINISHED}),
        SeqStatus.FINISHED: frozenset(),
    }
)


def _is_plain(sampling: SamplingParams) -> bool:
    """Whether a token is simply the most likely one and nothing is to be told about it."""
    has_penalty = (
        sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    )
    return (
        sampling.is_greedy
        and not has_penalty
        and not sampling.logit_bias
        and not (sampling.min_tokens and sampling.stop_token_ids)
        and sampling.logprobs is None
    )


class Sequence:
    """Mutable; written by the engine thread, and under the engine's lock where others read it."""

    __slots__ = (
        "_num_computable_tokens",
        "_tokens",
        "added_ns",
        "block_hashes",
        "finish_reason",
        "held_at_ns",
        "is_plain",
        "max_num_tokens",
        "mode",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_tokens",
        "num_tokens_in_flight",
        "num_unknown_tokens",
        "paced_from_ns",
        "paced_from_tokens",
        "prompt_logprobs",
        "request",
        "scheduled_ns",
        "status",
        "table",
    )

    def __init__(
        self,
        request: Request,
        mode: SequenceMode,
        block_hashes: list[BlockHash],
        added_ns: int,
        max_model_len: int = sys.maxsize,
    ) -> None:
        """``block_hashes`` of the full blocks of ``request.token_ids``."""
        self.request = request
        self.mode = mode
        self.status = SeqStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_tokens = len(request.token_ids)
        self._tokens: NDArray[np.int64] = np.empty(self.num_tokens + 64, dtype=np.int64)
        self._tokens[: self.num_tokens] = request.token_ids
        self.block_hashes = block_hashes
        self.table: BlockTable | None = None
        longest = request.num_prompt_tokens + request.sampling.max_tokens
        self.max_num_tokens = min(longest, max_model_len)
        # Nobody asks for what follows the last token; a PREFILL_ONLY one goes on elsewhere.
        only_prompt = mode is SequenceMode.PREFILL_ONLY
        self._num_computable_tokens = self.num_tokens if only_prompt else self.max_num_tokens - 1
        self.num_computed_tokens = 0
        self.num_tokens_in_flight = 0
        self.num_unknown_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.is_plain = _is_plain(request.sampling)
        self.added_ns = added_ns
        self.scheduled_ns = 0
        self.held_at_ns = 0
        self.paced_from_ns = 0  # when the first token after its prompt was there; 0 = it is not
        self.paced_from_tokens = 0  # how many tokens there were then

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """View of all tokens so far, int64 [num_tokens]."""
        return self._tokens[: self.num_tokens]

    def token_at(self, index: int) -> int | None:
        """None for a token that a step in flight has yet to sample."""
        return int(self._tokens[index]) if index < self.num_tokens else None

    @property
    def output_token_ids(self) -> NDArray[np.int64]:
        """View of the tokens after the prompt, those delivered before a resume included."""
        return self._tokens[self.request.num_prompt_tokens : self.num_tokens]

    @property
    def last_token_id(self) -> int:
        return int(self._tokens[self.num_tokens - 1])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Tokens once all steps in flight have landed, if none of them ends the sequence."""
        return self.num_tokens + self.num_unknown_tokens

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens that the next step may run; 0 when those in flight are sure to bring the end."""
        expected = self.num_tokens + self.num_unknown_tokens
        expected = min(expected, self._num_computable_tokens)
        return expected - self.num_planned_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Tokens that are computed once all steps in flight have landed."""
        return self.num_computed_tokens + self.num_tokens_in_flight

    @property
    def can_be_preempted(self) -> bool:
        """Blocks of a PREFILL_ONLY sequence may be read by a peer's transfer at any time."""
        return self.mode is not SequenceMode.PREFILL_ONLY

    @property
    def is_prompt(self) -> bool:
        """True until its first token of this engine, or the one that came with its KV."""
        return self.num_tokens == len(self.request.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until they went out with the first token of this engine."""
        return self.is_prompt and self.request.sampling.prompt_logprobs is not None

    def move_to(self, status: SeqStatus) -> None:
        self.status = SEQ_TRANSITIONS.check(self.status, status)

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Empty unless they were asked for and this is the first token of this engine."""
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    def take_off(self, count: int) -> tuple[int, bool]:
        """A step was planned with ``count`` more tokens: the first one's index, and whether the
        step samples the token after them."""
        start = self.num_planned_tokens
        samples = start + count == self.num_expected_tokens
        self.num_tokens_in_flight += count
        self.num_unknown_tokens += samples
        return start, samples

    def land(self, count: int) -> None:
        """``count`` tokens in flight are computed."""
        self.num_tokens_in_flight -= count
        self.num_computed_tokens += count

    def land_token(self, token_id: int) -> None:
        """The token that a step in flight has sampled."""
        self.num_unknown_tokens -= 1
        self.append_token(token_id)

    def pace_from(self, now_ns: int) -> None:
        """TPOT counts from the last of the tokens that there are, at ``now_ns`` (monotonic)."""
        self.paced_from_ns = now_ns
        self.paced_from_tokens = self.num_tokens

    def append_token(self, token_id: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def extend_block_hashes(self, block_size: int, root: BlockHash) -> None:
        """Hashes the blocks that are full by now."""
        while len(self.block_hashes) < self.num_tokens // block_size:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else root
            block_tokens = self._tokens[start : start + block_size].astype("<u4")
            self.block_hashes.append(child_hash(parent, block_tokens.tobytes()))

    def restart(self) -> None:
        """Forgets what was computed, keeps every token. Nothing of it may be in flight."""
        assert not self.num_tokens_in_flight
        self.table = None
        self.num_computed_tokens = 0
        self.prompt_logprobs = []
