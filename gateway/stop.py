"""Stop strings over a stream of text.

Text that could be the beginning of a stop string is held back until it is known to be none. The
match that ends first wins (of two that end together the longer), which does not depend on how the
text was cut into deltas.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """One per output sequence. After ``matched`` is set, nothing more may be pushed."""

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """The text that may be shown now; ends exactly before a stop string when one was found."""
        if not self._stops:
            return delta
        assert self.matched is None, "the sequence has ended"
        text = self._held + delta
        start = self._find(text)
        if start is not None:
            self._held = ""
            return text[:start]
        keep = self._overlap(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str) -> int | None:
        best: tuple[int, int] | None = None  # (end, start), smallest first
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                found = (start + len(stop), start)
                if best is None or found < best:
                    best, self.matched = found, stop
        return None if best is None else best[1]

    def _overlap(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
