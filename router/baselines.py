"""Policies to compare with, behind the same seam: no prediction, one leg at a time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from typing import Any

from isthmus.common.types import LocalPrefillReason
from isthmus.router.decider import local_prefill_reason
from isthmus.router.policy import Candidate, Pool
from isthmus.router.predictor import DecodeOption, PrefillOption
from isthmus.router.types import RouteQuery

MAX_CANDIDATES = 4
DecodeKey = Callable[[DecodeOption], Any]
PrefillKey = Callable[[PrefillOption], Any]


class _LegByLeg:
    """Orders decode instances by one key, then gives each the best prefill instance by another."""

    def __init__(self, name: str, decode_key: DecodeKey, prefill_key: PrefillKey) -> None:
        self.name = name
        self._decode_key = decode_key
        self._prefill_key = prefill_key

    def rank(self, query: RouteQuery, pool: Pool) -> list[Candidate]:  # noqa: ARG002
        decodes = nsmallest(MAX_CANDIDATES, pool.decodes, key=self._decode_key)
        return [self._pair(place, decode, pool) for place, decode in enumerate(decodes)]

    def _pair(self, place: int, decode: DecodeOption, pool: Pool) -> Candidate:
        prefills = pool.prefills.get(decode.view.key, [])
        reason = local_prefill_reason(decode, bool(prefills), pool.min_remote_tokens)
        if reason is not None:
            return Candidate(decode, pool.local(decode), reason, float(place))
        prefill = min(prefills, key=self._prefill_key)
        return Candidate(decode, prefill, LocalPrefillReason.NONE, float(place))


def round_robin() -> _LegByLeg:
    """Least recently chosen first: even however membership changes."""
    return _LegByLeg(
        "round_robin",
        lambda option: option.view.last_chosen,
        lambda option: option.view.last_chosen,
    )


def least_loaded() -> _LegByLeg:
    """Shortest prefill queue and fewest sequences, blind to caches."""
    return _LegByLeg(
        "least_loaded",
        lambda option: (option.num_seqs, option.view.last_chosen),
        lambda option: (option.wait_ms, option.view.last_chosen),
    )
