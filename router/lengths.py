"""How long answers turn out to be, by model, class of service and size of the prompt.

Only ever right in the mean, which is all that is asked of it: the load on a decode instance is a
sum. Each group keeps a histogram over powers of the square root of two, halved when it has seen
``MEMORY`` lengths, so that it forgets. A group that has seen little leans on its class, that on its
model, that on a constant. At most ``MAX_GROUPS`` groups; the one used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import log2

from isthmus.router.quantiles import bucket_of

FIRST_GUESS = 128
MEMORY = 512
ENOUGH = 16
MAX_GROUPS = 1_024
NUM_BINS = 44  # up to 2^22 tokens

Group = tuple[str, str, int]
ANY_BUCKET = -1


@dataclass(slots=True)
class _Histogram:
    counts: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    sums: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    total: float = 0.0

    def add(self, length: int) -> None:
        place = min(NUM_BINS - 1, int(2 * log2(max(1, length))))
        self.counts[place] += 1
        self.sums[place] += length
        self.total += 1
        if self.total >= MEMORY:
            self.counts = [count / 2 for count in self.counts]
            self.sums = [value / 2 for value in self.sums]
            self.total /= 2

    def mean(self, limit: int) -> float:
        """Of min(length, limit). A bin that straddles the limit counts by its mean."""
        below = 0.0
        for count, value in zip(self.counts, self.sums, strict=True):
            if count:
                below += min(value, limit * count)
        return below / self.total


class OutputLengths:
    def __init__(self) -> None:
        self._groups: OrderedDict[Group, _Histogram] = OrderedDict()
        self._cache: dict[tuple[Group, int], float] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def observe(self, model: str, class_name: str, num_prompt: int, num_output: int) -> None:
        """A request ended by itself with so many output tokens."""
        for group in _groups(model, class_name, num_prompt):
            self._of(group).add(num_output)
        self._cache.clear()

    def expected(self, model: str, class_name: str, num_prompt: int, limit: int) -> int:
        """Output tokens to reckon with, between 1 and ``limit``."""
        key = ((model, class_name, bucket_of(num_prompt)), limit)
        known = self._cache.get(key)
        if known is None:
            known = self._mean(model, class_name, num_prompt, limit)
            if len(self._cache) >= MAX_GROUPS:
                self._cache.clear()
            self._cache[key] = known
        return max(1, min(limit, round(known)))

    def _mean(self, model: str, class_name: str, num_prompt: int, limit: int) -> float:
        mean = float(min(limit, FIRST_GUESS))
        for group in reversed(_groups(model, class_name, num_prompt)):
            histogram = self._groups.get(group)
            if histogram is not None and histogram.total:
                share = min(1.0, histogram.total / ENOUGH)
                mean = share * histogram.mean(limit) + (1 - share) * mean
        return mean

    def _of(self, group: Group) -> _Histogram:
        histogram = self._groups.get(group)
        if histogram is None:
            histogram = self._groups[group] = _Histogram()
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        else:
            self._groups.move_to_end(group)
        return histogram


def _groups(model: str, class_name: str, num_prompt: int) -> tuple[Group, ...]:
    """From the most special to the most general."""
    return (
        (model, class_name, bucket_of(num_prompt)),
        (model, class_name, ANY_BUCKET),
        (model, "", ANY_BUCKET),
    )
