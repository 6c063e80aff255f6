"""Policies to compare with, behind the same seam: no prediction, one leg at a time."""

from __future__ import annotations

import random
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
        return [
            _pair(place, decode, pool.prefills.get(decode.view.key, []), pool, self._prefill_key)
            for place, decode in enumerate(decodes)
        ]


class _PowerOfTwo:
    """Of two drawn at random the less loaded, for each leg (M. Mitzenmacher, IEEE TPDS 2001)."""

    name = "power_of_two"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def rank(self, query: RouteQuery, pool: Pool) -> list[Candidate]:  # noqa: ARG002
        decodes = sorted(self._two(pool.decodes), key=_num_seqs)
        return [
            _pair(place, decode, self._two(pool.prefills.get(decode.view.key, [])), pool, _wait_ms)
            for place, decode in enumerate(decodes)
        ]

    def _two(self, options: list[Any]) -> list[Any]:
        return self._random.sample(options, 2) if len(options) > 2 else options


def _pair(
    place: int,
    decode: DecodeOption,
    prefills: list[PrefillOption],
    pool: Pool,
    prefill_key: PrefillKey,
) -> Candidate:
    reason = local_prefill_reason(decode, bool(prefills), pool.min_remote_tokens)
    if reason is not None:
        return Candidate(decode, pool.local(decode), reason, float(place))
    prefill = pool.fetched(decode, min(prefills, key=prefill_key))
    return Candidate(decode, prefill, LocalPrefillReason.NONE, float(place))


def _num_seqs(option: DecodeOption) -> tuple[int, int]:
    return option.num_seqs, option.view.last_chosen


def _wait_ms(option: PrefillOption) -> tuple[float, int]:
    return option.wait_ms, option.view.last_chosen


def round_robin() -> _LegByLeg:
    """Least recently chosen first: even however membership changes."""
    return _LegByLeg(
        "round_robin",
        lambda option: option.view.last_chosen,
        lambda option: option.view.last_chosen,
    )


def least_loaded() -> _LegByLeg:
    """Shortest prefill queue and fewest sequences, blind to caches."""
    return _LegByLeg("least_loaded", _num_seqs, _wait_ms)


def power_of_two(seed: int = 0) -> _PowerOfTwo:
    """Two choices, blind to caches."""
    return _PowerOfTwo(seed)


def prefix_only() -> _LegByLeg:
    """Who has cached most of the prompt; of several the least recently chosen. Blind to load."""
    return _LegByLeg(
        "prefix_only",
        lambda option: (-option.cached_tokens, option.view.last_chosen),
        lambda option: (-option.cached_tokens, option.view.last_chosen),
    )
