"""The seam between "who could" and "who does".

The router filters instances into a ``Pool``; a policy ranks pairs of it. Policies never look at
breakers, epochs or registries, and the router never looks at a score: a policy that weighs other
goals takes this one's place without a change elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Protocol, TypeVar

from isthmus.common.types import LocalPrefillReason
from isthmus.router.cluster_view import InstanceView
from isthmus.router.decider import local_prefill_reason
from isthmus.router.pairing import CompatKey
from isthmus.router.predictor import DecodeOption, PrefillOption, expected_output
from isthmus.router.sessions import LastServed
from isthmus.router.types import RouteQuery

OptionT = TypeVar("OptionT", PrefillOption, DecodeOption)
MAX_PER_ROLE = 4
NEAR_TIE_MS = 1.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Options that passed every filter. ``prefills`` are grouped by what they may hand KV to.

    ``local`` predicts the prompt computed by a decode instance itself, ``fetched`` by a prefill
    instance that fetches from a decode instance what KV of it that one has, where it would.
    ``transfer_ms``: until what a decode instance lacks is there, from somebody or anybody.
    ``last``: where the session's last turn was served.
    """

    prefills: dict[CompatKey, list[PrefillOption]]
    decodes: list[DecodeOption]
    local: Callable[[DecodeOption], PrefillOption]
    fetched: Callable[[DecodeOption, PrefillOption], PrefillOption]
    transfer_ms: Callable[[DecodeOption, InstanceView | None], float]
    min_remote_tokens: int
    last: LastServed | None = None

    def worth_ms(self, option: PrefillOption | DecodeOption) -> float:
        """What it is worth that the session stays with this instance."""
        last, instance_id = self.last, option.view.instance_id
        if last is None or instance_id not in (last.prefill, last.decode):
            return 0.0
        return last.worth_ms


@dataclass(slots=True)
class Candidate:
    """A pair, or a decode instance alone (``prefill`` is its own option then)."""

    decode: DecodeOption
    prefill: PrefillOption
    local_reason: LocalPrefillReason
    score: float

    @property
    def is_local(self) -> bool:
        return self.local_reason is not LocalPrefillReason.NONE

    @property
    def last_chosen(self) -> tuple[int, int]:
        return self.decode.view.last_chosen, self.prefill.view.last_chosen


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def rank(self, query: RouteQuery, pool: Pool) -> list[Candidate]:
        """Candidates, best first; at least one when the pool has a decode option."""
        ...


class LeastPredictedLoad:
    """Least predicted completion time plus the time taken from others, over pairs.

    score = wait_d + TTFT + exposed transfer + ô · TPOT + stolen, where a local prefill steals its
    whole length from each of the decode instance's residents and from the place it takes itself:
    without that an idle decode instance would always look like the best place to prefill. The
    score of a pair is a sum of one term per leg, so the best pair is among the best few of each
    role (pairs that may hand KV to each other), and 64 × 64 instances need not be crossed.
    """

    name = "least_predicted_load"

    def rank(self, query: RouteQuery, pool: Pool) -> list[Candidate]:
        output_tokens = expected_output(query)
        prefills = {
            key: _cheapest(
                options, _less_worth([option.ttft_ms for option in options], options, pool)
            )
            for key, options in pool.prefills.items()
        }
        costs = [
            option.wait_ms + output_tokens * option.tpot_ms + pool.transfer_ms(option, None)
            for option in pool.decodes
        ]
        costs = _less_worth(costs, pool.decodes, pool)
        cheapest = _cheapest(pool.decodes, costs)
        # Not cheap as one of a pair, but maybe the best alone: who holds most of the prompt.
        holders = [option for option in pool.decodes if option.cached_tokens]
        fullest = _cheapest(holders, [option.uncached_tokens for option in holders])
        decodes = {option.view.instance_id: option for option in (*cheapest, *fullest)}
        candidates: list[Candidate] = []
        for decode in decodes.values():
            candidates += self._of(decode, prefills.get(decode.view.key, []), pool, output_tokens)
        return settle_near_ties(candidates)

    def _of(
        self,
        decode: DecodeOption,
        prefills: list[PrefillOption],
        pool: Pool,
        output_tokens: int,
    ) -> list[Candidate]:
        rest_ms = decode.wait_ms + output_tokens * decode.tpot_ms - pool.worth_ms(decode)
        has_pair = bool(pool.prefills.get(decode.view.key))
        reason = local_prefill_reason(decode, has_pair, pool.min_remote_tokens)
        local = pool.local(decode)
        stolen_ms = local.prefill_ms * (1 + decode.num_seqs)
        alone = Candidate(
            decode,
            local,
            reason or LocalPrefillReason.POLICY,
            rest_ms + local.ttft_ms + stolen_ms,
        )
        if reason is not None:
            return [alone]
        pairs = []
        for option in prefills:
            prefill = pool.fetched(decode, option)
            score = rest_ms + _prefill_cost(prefill, pool)
            score += pool.transfer_ms(decode, prefill.view)
            pairs.append(Candidate(decode, prefill, LocalPrefillReason.NONE, score))
        return [*pairs, alone]


def settle_near_ties(candidates: list[Candidate]) -> list[Candidate]:
    """By score; among those about as good as the best, the least recently chosen comes first.

    Without this an idle cluster of equal instances would use the first one only.
    """
    ranked = sorted(candidates, key=lambda candidate: candidate.score)
    if len(ranked) < 2:
        return ranked
    limit = ranked[0].score + NEAR_TIE_MS
    num_tied = sum(candidate.score <= limit for candidate in ranked)
    tied = sorted(ranked[:num_tied], key=lambda candidate: candidate.last_chosen)
    return tied + ranked[num_tied:]


def _less_worth(
    costs: list[float], options: Sequence[PrefillOption | DecodeOption], pool: Pool
) -> list[float]:
    if pool.last is None:
        return costs
    return [cost - pool.worth_ms(option) for cost, option in zip(costs, options, strict=True)]


def _prefill_cost(prefill: PrefillOption, pool: Pool) -> float:
    return prefill.ttft_ms - pool.worth_ms(prefill)


def _cheapest(options: list[OptionT], costs: Sequence[float]) -> list[OptionT]:
    """The few of least cost; of equal cost, those least recently chosen."""
    if len(options) > MAX_PER_ROLE:
        limit = nsmallest(MAX_PER_ROLE, costs)[-1]
        near = [(cost, place) for place, cost in enumerate(costs) if cost <= limit]
    else:
        near = [(cost, place) for place, cost in enumerate(costs)]
    near.sort(key=lambda item: (item[0], options[item[1]].view.last_chosen, item[1]))
    return [options[place] for _, place in near[:MAX_PER_ROLE]]
