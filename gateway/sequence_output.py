"""What has come of one output sequence: its tokens, their text, when they came, what is not taken.

Survives a change of instance: its tokens are what the sequence is resumed with.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.common import metrics
from isthmus.common.clock import NS_PER_S, Clock
from isthmus.common.types import FinishReason, SamplingParams, TokenLogprob
from isthmus.gateway.class_metrics import metrics_of
from isthmus.gateway.output_text import OutputText
from isthmus.gateway.plan import ChoiceDelta, GenerationPlan, PreparedPrompt
from isthmus.gateway.tokenizer import TextTokenizer


class SequenceOutput:
    """Tokens in, deltas out. Ends with ``is_stopped`` or ``finish``."""

    def __init__(
        self,
        plan: GenerationPlan,
        prompt: PreparedPrompt,
        sampling: SamplingParams,
        tokenizer: TextTokenizer,
        clock: Clock,
    ) -> None:
        self.token_ids: list[int] = []
        """All that were delivered, those behind a stop string included."""
        self._is_wanted = plan.has_output
        self._second_token_gap = metrics_of(plan.slo.class_name).second_token_gap
        self._max_tokens = sampling.max_tokens
        self._text = OutputText(tokenizer, prompt.token_ids, plan.stop_strings, sampling)
        self._delta = ChoiceDelta()
        self._clock = clock
        self._first_token_ns = 0
        self._last_token_ns = 0

    @property
    def num_tokens(self) -> int:
        """Without those behind a stop string."""
        return self._text.num_tokens

    @property
    def is_stopped(self) -> bool:
        """A stop string was found."""
        return self._text.matched_stop is not None

    @property
    def has_news(self) -> bool:
        """True when something can be shown; logprobs wait for the text they belong to."""
        return bool(self._delta.text or self._delta.finish_reason)

    @property
    def tpot_s(self) -> float | None:
        """Seconds from one token to the next as they came to the gateway; None below two tokens."""
        gaps = len(self.token_ids) - 1
        if gaps < 1:
            return None
        return (self._last_token_ns - self._first_token_ns) / NS_PER_S / gaps

    @property
    def first_token_ns(self) -> int | None:
        """When the first token came, unix time; None before."""
        if not self._first_token_ns:
            return None
        return self._clock.now_ns() - (self._clock.monotonic_ns() - self._first_token_ns)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> bool:
        """Tokens that came together; what follows a stop string is dropped. True: one was found."""
        if token_ids:
            self._observe_gaps(len(token_ids))
        if self._is_wanted and (text := self._text.try_push_all(token_ids)) is not None:
            self.token_ids += token_ids
            self._delta.text += text
            self._delta.token_ids += token_ids
            self._delta.logprobs += logprobs
            return False
        for position, token_id in enumerate(token_ids):
            self._accept(token_id, logprobs[position] if logprobs else None)
            if self.is_stopped:
                return True
        return False

    def finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        """Adds what was held back. A stop string found in it is the reason then."""
        self._delta.text += self._text.finish(by_stop_token=reason is FinishReason.STOP)
        if self._text.matched_stop is not None:
            reason, stop_reason = FinishReason.STOP, self._text.matched_stop
        self._delta.finish_reason, self._delta.stop_reason = reason, stop_reason

    def take(self) -> ChoiceDelta:
        delta, self._delta = self._delta, ChoiceDelta()
        return delta

    def natural_end(self) -> FinishReason | None:
        """How the sequence has ended by its own tokens; None when it would go on."""
        if not self.token_ids:
            return None
        if self._text.ends_in_stop_token:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self._max_tokens else None

    def _accept(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.token_ids.append(token_id)
        if not self._is_wanted:
            return
        num_before = self._text.num_tokens
        self._delta.text += self._text.push(token_id)
        if self._text.num_tokens == num_before:  # behind a stop string
            return
        self._delta.token_ids.append(token_id)
        if logprob is not None:
            self._delta.logprobs.append(logprob)

    def _observe_gaps(self, num_tokens: int) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._last_token_ns:
            gap_s = (now_ns - self._last_token_ns) / NS_PER_S
            if len(self.token_ids) == 1:
                self._second_token_gap.observe(gap_s)
            metrics.ITL.observe(gap_s / num_tokens, num_tokens)
        else:
            self._first_token_ns = now_ns
        self._last_token_ns = now_ns
