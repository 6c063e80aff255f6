"""What a router's reservations add to an instance's last report, and sums that it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.router.reservation import NO_LIMIT, Reservation


@dataclass(slots=True)
class PendingLoad:
    """``decode_…``: on top of an instance's last report. Of all that this router knows to be there:
    ``tightest_tpot_ms`` of the decode legs, ``prompts_ms`` of prompts without a first token,
    ``head_ms`` of the oldest of them, which is computed since ``head_since_ns`` at the earliest;
    ``num_strange``: sequences in the last report that are not this router's.
    """

    decode_seqs: int = 0
    decode_context_tokens: int = 0
    decode_blocks: int = 0
    tightest_tpot_ms: float = NO_LIMIT
    prompts_ms: float = 0.0
    head_ms: float = 0.0
    head_since_ns: int = 0
    num_strange: int = 0


@dataclass(slots=True)
class LegSum:
    """Of some legs of an instance: how many, how many of them decode there, and with how much
    context."""

    num_legs: int = 0
    decode_seqs: int = 0
    context_tokens: int = 0

    def count(self, leg: Reservation, sign: int, *, is_decode: bool) -> None:
        self.num_legs += sign
        if is_decode:
            self.decode_seqs += sign
            self.context_tokens += sign * leg.burden.context_tokens
