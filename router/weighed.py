"""What a policy says of one query and one table: candidates, or what is in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.router.policy import Candidate

NO_DECODE_INSTANCE = "no_decode_instance"
DECODE_FULL = "decode_full"  # no KV blocks or no place in the batch
TPOT = "tpot"
PREFILL_BUSY = "prefill_busy"
TTFT = "ttft"
RESERVED = "reserved"  # for classes that weigh more (``reserve``)


@dataclass(slots=True)
class Weighed:
    """``candidates``: that can start now and keep every promise, best first; may be empty.

    ``work_ms``: TTFT on the best instance if it were idle; ``floor_quantile_ms``: as its quantile;
    ``least_ttft_ms``, ``least_tpot_ms``: what the quickest of all that are registered would take if
    it were idle and as quick as its model says, whether it may be chosen now or not. ``ready_ms``:
    when somebody could start. ``obstacle`` names what kept the list empty.
    """

    candidates: Sequence[Candidate]
    work_ms: float
    floor_quantile_ms: float
    least_ttft_ms: float
    least_tpot_ms: float
    ready_ms: float
    num_workers: int
    obstacle: str = ""
