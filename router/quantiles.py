"""How wrong predictions are: quantiles of measured / predicted, and whether they hold.

For each (kind of time, size bucket) the last ``WINDOW`` ratios are kept in order. A class that asks
for the q-quantile gets the window's value at a level that is itself corrected: up a little with
each measurement above the answer, down less with each below, so that the share below tends to q
whatever drifts (adaptive conformal inference, Gibbs and Candès, NeurIPS 2021). Everything is
bounded: buckets are few by construction, levels by ``MAX_LEVELS``.

Two shares are kept of each level's last measurements. *Kept*: within what was promised when it was
decided. *Coverage*: of the same ones, where the instance's model has become another one since then
(``OUTDATED``), within what it would promise now, before it learns of them. A long answer may end a
minute after its promise; that an instance has slowed down meanwhile is a promise broken, and says
nothing of whether predictions are right now. A model that has not noticed has no such excuse.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from isthmus.common.clock import NS_PER_S

Floats = NDArray[np.float64]
WINDOW = 200
ENOUGH = 20  # ratios, below which the guess below counts as well
PRIOR_SPREAD = 0.25  # of the ratio at level 1 above 1, before anything was measured
FLOOR_MS = 10.0  # constant overheads must not read as large ratios of tiny times
STEP = 0.02  # of the corrected level
LEVEL_DOWN, LEVEL_UP = 0.1, 0.6  # how far it may go: late news of many would overshoot
TOLERANCE = 0.03  # of a quantile that not even an idle instance gives
MEMORY_NS = 60 * NS_PER_S
MAX_RATIO = 4.0
"""What nobody is admitted for is not measured either: old ratios are forgotten, and none is taken
for more than this, so that bad times cannot keep everybody out for ever."""
OUTDATED = 1.2  # a promise, of a model that says so many times as much now, or as little
COVERAGE_WINDOW = 200
MAX_LEVELS = 16
BUCKET_TOKENS = (128, 512, 2_048, 8_192, 32_768)


class Kind(Enum):
    """Which time: they differ in what makes them wrong."""

    TTFT = "ttft"  # of a prompt computed by a prefill instance
    LOCAL_TTFT = "local_ttft"  # of one computed where it is decoded
    TPOT = "tpot"
    STEP = "step"  # of the same, without what the instance held its decodes up for prompts

    __hash__ = object.__hash__  # an enum's own is computed in Python


def bucket_of(num_tokens: int) -> int:
    """Of a size in tokens (prompt) or sequences' context: 0 … len(BUCKET_TOKENS)."""
    return bisect_left(BUCKET_TOKENS, num_tokens)


def ratio_of(measured_ms: float, predicted_ms: float) -> float:
    return (measured_ms + FLOOR_MS) / (predicted_ms + FLOOR_MS)


def scaled(predicted_ms: float, ratio: float) -> float:
    """The time that ``ratio`` turns a prediction into: the inverse of ``ratio_of``."""
    return max(0.0, (predicted_ms + FLOOR_MS) * ratio - FLOOR_MS)


@dataclass(frozen=True, slots=True)
class Promise:
    """What was said of one time: ``promised_ms`` is the ``quantile`` of what ``predicted_ms`` turns
    out to be."""

    kind: Kind
    bucket: int
    quantile: float
    predicted_ms: float
    promised_ms: float


@dataclass(slots=True)
class _Share:
    """Of the last ``COVERAGE_WINDOW`` measurements."""

    hits: deque[bool] = field(default_factory=lambda: deque(maxlen=COVERAGE_WINDOW))
    num_hits: int = 0

    def add(self, is_hit: bool) -> None:
        if len(self.hits) == COVERAGE_WINDOW:
            self.num_hits -= self.hits[0]
        self.hits.append(is_hit)
        self.num_hits += is_hit


@dataclass(slots=True)
class _Level:
    """The corrected level for one asked-for quantile, and what came of it."""

    level: float
    coverage: _Share = field(default_factory=_Share)
    kept: _Share = field(default_factory=_Share)

    def learn(self, quantile: float, is_hit: bool, is_kept: bool) -> None:
        self.level += STEP * ((0.0 if is_hit else 1.0) - (1.0 - quantile))
        low, high = quantile - LEVEL_DOWN, quantile + LEVEL_UP * (1.0 - quantile)
        self.level = min(max(self.level, low, 0.0), high)
        self.coverage.add(is_hit)
        self.kept.add(is_kept)


@dataclass(slots=True)
class Residuals:
    """Of one kind and bucket."""

    recent: deque[tuple[float, int]] = field(default_factory=deque)  # ratio, when
    ordered: array[float] = field(default_factory=lambda: array("d"))
    levels: dict[int, _Level] = field(default_factory=dict)  # by thousandths of the quantile
    _answers: dict[float, float] = field(default_factory=dict)  # of ``ratio``, until it has news

    def ratio(self, quantile: float, now_ns: int) -> float:
        """What to multiply a prediction by so that the ``quantile`` of measurements is below."""
        self._forget(now_ns)
        known = self._answers.get(quantile)
        if known is None:
            if len(self._answers) >= MAX_LEVELS:
                self._answers.clear()
            known = self._answers[quantile] = self._ratio(quantile)
        return known

    def _ratio(self, quantile: float) -> float:
        level = self.levels.get(_key(quantile))
        wanted = level.level if level is not None else quantile
        prior = 1.0 + PRIOR_SPREAD * max(0.0, wanted - 0.5) * 2
        count = len(self.ordered)
        if not count:
            return prior
        value = self._at(wanted)
        share = min(1.0, count / ENOUGH)
        return min(MAX_RATIO, share * value + (1.0 - share) * prior)

    def share_above(self, ratios: Floats) -> Floats:
        """Of measurements, the share that is more than ``ratios`` times what was predicted."""
        guess: Floats = np.clip((1.0 - ratios) / (2 * PRIOR_SPREAD) + 0.5, 0.0, 1.0)
        count = len(self.ordered)
        if not count:
            return guess
        seen = 1.0 - np.searchsorted(np.frombuffer(self.ordered), ratios, side="right") / count
        share = min(1.0, count / ENOUGH)
        above: Floats = share * seen + (1.0 - share) * guess
        return above

    def within(self, quantile: float, most: float, now_ns: int) -> float:
        """As ``ratio``, but not more than ``most``, which is what an idle instance could bear: if
        the quantile is beyond it, about what an idle instance would give is all that is asked.
        Else a few bad times would be a reason to serve nobody."""
        ratio = self.ratio(quantile, now_ns)
        if ratio <= most:
            return ratio
        if len(self.ordered) < ENOUGH:
            return most
        share = bisect_left(self.ordered, most) / len(self.ordered)
        return min(most, self._at(max(0.0, share - TOLERANCE)))

    def observe(self, ratio: float, now_ns: int) -> None:
        if len(self.recent) == WINDOW:
            self._drop_oldest()
        self.recent.append((ratio, now_ns))
        insort(self.ordered, ratio)
        self._answers.clear()

    def _forget(self, now_ns: int) -> None:
        while self.recent and self.recent[0][1] < now_ns - MEMORY_NS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        ratio, _ = self.recent.popleft()
        del self.ordered[bisect_left(self.ordered, ratio)]
        self._answers.clear()

    def covered(self, quantile: float, is_hit: bool, is_kept: bool) -> None:
        """A measurement was (not) below the answer that would be given for ``quantile`` now, and
        (not) below the one that was."""
        key = _key(quantile)
        level = self.levels.get(key)
        if level is None:
            if len(self.levels) >= MAX_LEVELS:
                return
            level = self.levels[key] = _Level(quantile)
        level.learn(quantile, is_hit, is_kept)
        self._answers.clear()

    def _at(self, level: float) -> float:
        """Linear between the order statistics; above the largest, the largest and a bit."""
        top = self.ordered[-1]
        if level >= 1.0:
            return top * (1.0 + (level - 1.0) * 4)
        place = level * (len(self.ordered) - 1)
        below = int(place)
        above = min(below + 1, len(self.ordered) - 1)
        low, high = self.ordered[below], self.ordered[above]
        return low + (high - low) * (place - below)


def _key(quantile: float) -> int:
    """In thousandths: to round a float costs several times as much."""
    return int(quantile * 1_000 + 0.5)


def _mean(shares: Sequence[_Share]) -> tuple[float, int]:
    total = sum(len(share.hits) for share in shares)
    return (sum(share.num_hits for share in shares) / total if total else 1.0), total


class ResidualTable:
    """Residuals by kind and bucket, and what came of all that was promised."""

    def __init__(self) -> None:
        self._table: dict[tuple[Kind, int], Residuals] = {}
        self._nothing = Residuals()  # never told anything

    def __len__(self) -> int:
        return len(self._table)

    def ratio(self, kind: Kind, bucket: int, quantile: float, now_ns: int) -> float:
        return self.of(kind, bucket).ratio(quantile, now_ns)

    def of(self, kind: Kind, bucket: int) -> Residuals:
        """For reading; nothing measured yet is a guess."""
        return self._table.get((kind, bucket), self._nothing)

    def observe(
        self, promise: Promise, measured_ms: float, now_ns: int, change: float = 1.0
    ) -> float:
        """``change``: what the model says now, of what it said when it was promised. Returns what
        is predicted of it, by the model as it is if that has become another one."""
        predicted_ms, promised_ms = promise.predicted_ms, promise.promised_ms
        found = self._made(promise.kind, promise.bucket)
        is_kept = is_hit = measured_ms <= promised_ms
        if not 1.0 / OUTDATED <= change <= OUTDATED:
            predicted_ms *= change
            promised_ms = scaled(predicted_ms, found.ratio(promise.quantile, now_ns))
            is_hit = measured_ms <= promised_ms
        found.observe(ratio_of(measured_ms, predicted_ms), now_ns)
        found.covered(promise.quantile, is_hit, is_kept)
        return predicted_ms

    def note(
        self, kind: Kind, bucket: int, measured_ms: float, predicted_ms: float, now_ns: int
    ) -> None:
        """As ``observe``, of what was promised to nobody."""
        self._made(kind, bucket).observe(ratio_of(measured_ms, predicted_ms), now_ns)

    def coverage(self, kind: Kind, quantile: float) -> tuple[float, int]:
        """Share of the recent measurements that were below the prediction, and their number."""
        return _mean([level.coverage for level in self._levels(kind, quantile)])

    def kept(self, kind: Kind, quantile: float) -> tuple[float, int]:
        """The same of what was promised, by whatever model."""
        return _mean([level.kept for level in self._levels(kind, quantile)])

    def _levels(self, kind: Kind, quantile: float) -> Iterator[_Level]:
        for (of_kind, _), residuals in self._table.items():
            level = residuals.levels.get(_key(quantile)) if of_kind is kind else None
            if level is not None:
                yield level

    def levels(self) -> set[tuple[Kind, float]]:
        """Kinds and quantiles of which there is a coverage."""
        return {
            (kind, key / 1_000)
            for (kind, _), residuals in self._table.items()
            for key in residuals.levels
        }

    def _made(self, kind: Kind, bucket: int) -> Residuals:
        found = self._table.get((kind, bucket))
        if found is None:
            found = self._table[kind, bucket] = Residuals()
        return found
