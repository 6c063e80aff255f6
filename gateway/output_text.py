"""The text of one output sequence: bytes to characters, stop strings cut off, stop tokens hidden.

A stop token of the client's may turn out not to end the sequence (``min_tokens``), so its text is
kept until the next token shows that the sequence goes on. Stop strings are looked for behind the
first ``min_tokens`` tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.common.types import SamplingParams
from isthmus.gateway.detokenizer import Detokenizer
from isthmus.gateway.stop import StopScanner
from isthmus.gateway.tokenizer import TextTokenizer


class OutputText:
    """Tokens in, showable text out. Ends when ``matched_stop`` is set or ``finish`` is called."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_ids: Sequence[int],
        stop_strings: Sequence[str],
        sampling: SamplingParams,
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._scanner = StopScanner(stop_strings)
        self._has_stop_strings = bool(stop_strings)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._held_stop: int | None = None

    @property
    def matched_stop(self) -> str | None:
        return self._scanner.matched

    @property
    def ends_in_stop_token(self) -> bool:
        """The last token was a stop token where one ends the sequence."""
        return self._held_stop is not None and self.num_tokens > self._min_tokens

    def try_push_all(self, token_ids: Sequence[int]) -> str | None:
        """The text of tokens of which none can end the sequence, all counted; None, and nothing
        done, when one by one they must be looked at."""
        is_plain = not self._has_stop_strings and self._held_stop is None
        if not is_plain or not self._stop_ids.isdisjoint(token_ids):
            return None
        self.num_tokens += len(token_ids)
        return self._detokenizer.push(token_ids)

    def push(self, token_id: int) -> str:
        """Text to show now. A token behind a stop string is not counted."""
        shown = self._release()
        if self.matched_stop is not None:
            return shown
        self.num_tokens += 1
        if token_id in self._stop_ids:
            self._held_stop = token_id
            return shown
        return shown + self._show(token_id)

    def finish(self, *, by_stop_token: bool) -> str:
        """The rest of the text. Unless a stop token ended the sequence, a held one is text too."""
        shown = "" if by_stop_token else self._release()
        return shown if self.matched_stop is not None else shown + self._scanner.flush()

    def _release(self) -> str:
        if self._held_stop is None:
            return ""
        held, self._held_stop = self._held_stop, None
        return self._show(held)

    def _show(self, token_id: int) -> str:
        text = self._detokenizer.push((token_id,))
        if not text or self.num_tokens <= self._min_tokens:
            return text
        return self._scanner.push(text)
