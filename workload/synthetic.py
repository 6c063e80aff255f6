"""Workloads made up: arrivals, lengths, shared prefixes, and a mix of classes and tenants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus.workload.arrivals import Arrivals, arrival_times
from isthmus.workload.lengths import Lengths
from isthmus.workload.types import Call


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a mix. ``num_prefixes`` > 0: each call begins with one of so many prefixes of
    ``prefix_blocks`` blocks."""

    weight: float
    prompt: Lengths
    output: Lengths
    slo_class: str = ""
    tenant: str = ""
    num_prefixes: int = 0
    prefix_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Mix:
    shares: tuple[Share, ...]

    def __post_init__(self) -> None:
        if not self.shares or any(share.weight <= 0 for share in self.shares):
            raise ValueError("a mix needs shares with positive weights")


def synthesise(mix: Mix, arrivals: Arrivals, count: int, seed: int) -> list[Call]:
    """The same seed gives the same calls; another rate gives the same ones at other times."""
    rng = np.random.default_rng(seed)
    due_s = arrival_times(arrivals, count, rng)
    weights = np.array([share.weight for share in mix.shares])
    of = rng.choice(len(mix.shares), count, p=weights / weights.sum())
    prompts = np.empty(count, dtype=np.int64)
    outputs = np.empty(count, dtype=np.int64)
    prefixes = np.full(count, -1, dtype=np.int64)
    for place, share in enumerate(mix.shares):
        chosen = np.flatnonzero(of == place)
        prompts[chosen] = share.prompt.draw(len(chosen), rng)
        outputs[chosen] = share.output.draw(len(chosen), rng)
        if share.num_prefixes:
            prefixes[chosen] = rng.integers(0, share.num_prefixes, len(chosen))
    columns = (of, due_s, prompts, outputs, prefixes)
    calls = []
    for index, (place, at, prompt, output, prefix) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        share = mix.shares[place]
        blocks = _prefix(place, prefix, share.prefix_blocks) if prefix >= 0 else ()
        calls.append(Call(index, at, prompt, output, blocks, share.slo_class, share.tenant))
    return calls


def _prefix(share: int, number: int, num_blocks: int) -> tuple[int, ...]:
    """Ids that no other share's prefixes have."""
    first = (share << 40) + number * num_blocks
    return tuple(range(first, first + num_blocks))
