"""How long answers are at least, as a rule: what a sequence that decodes may still count on."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

WINDOW = 200
ENOUGH = 20
SHORTER = 0.05
"""Share of the answers that may be shorter."""


class AnswerLengths:
    """Of the last ``WINDOW`` answers, whoever ended them: a stop string does so from outside."""

    def __init__(self) -> None:
        self.least = 0
        """Tokens that all but ``SHORTER`` of them had; 0 until ``ENOUGH`` are known."""
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    def observe(self, num_tokens: int) -> None:
        if len(self._recent) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(num_tokens)
        insort(self._ordered, num_tokens)
        if len(self._ordered) >= ENOUGH:
            self.least = self._ordered[int(SHORTER * len(self._ordered))]
