"""Which part of a model each rank of an instance holds.

::

    heads      whole groups: a KV head and the query heads that read it. More ranks than KV heads:
               each KV head on several ranks, its query heads dealt among them
    embedding, output layer          rows, by vocabulary
    query, key, value, gate, up      rows: a rank computes its heads and its part of the inner width
    attention output, down           Split.OUTPUT: rows, over inputs that were joined before
                                     Split.INPUT: columns, over the rank's own; results are summed

With Split.OUTPUT every number is computed by one rank, in the order in which a single rank would,
so the tokens are bit for bit those of one rank. Split.INPUT sends fewer bytes and waits half as
often (Shoeybi et al., "Megatron-LM", 2019, §3), at the price of another order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from isthmus.common.errors import ConfigError
from isthmus.common.kv_layout import dealt, head_ranges
from isthmus.engine.models.config import DecoderConfig

Parts = tuple[range, ...]
"""One range per rank, in their order."""


class Split(Enum):
    """How the projections back to the hidden size are cut."""

    OUTPUT = "output"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of one tensor; None = all of them."""

    rows: range | None = None
    columns: range | None = None

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part of a tensor of ``shape``."""
        cuts = (self.rows, self.columns)[: len(shape)]
        return tuple(
            size if cut is None else len(cut) for size, cut in zip(shape, cuts, strict=True)
        )

    def slices(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """What indexes a tensor of ``shape`` to get the part."""
        cuts = (self.rows, self.columns)[: len(shape)]
        return tuple(slice(None) if cut is None else slice(cut.start, cut.stop) for cut in cuts)


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class Shard:
    """The parts of all ranks, and which of them is this one's."""

    rank: int
    size: int
    query_heads: Parts
    kv_heads: Parts
    ffn: Parts
    hidden: Parts
    vocab: Parts

    def own(self, parts: Parts) -> range:
        return parts[self.rank]


def shard_of(config: DecoderConfig, rank: int, size: int) -> Shard:
    """Raises ConfigError, naming the sizes that work, when the heads cannot be dealt."""
    sizes = supported_sizes(config)
    if size not in sizes:
        raise ConfigError(
            f"tp_size {size} does not work for {config.num_heads} query heads over "
            f"{config.num_kv_heads} KV heads; sizes that do: {', '.join(map(str, sizes))}",
            stage="load",
            param="engine.tp_size",
        )
    per_group = config.num_heads // config.num_kv_heads
    kv_heads = head_ranges(config.num_kv_heads, size)
    if size <= config.num_kv_heads:
        query_heads = tuple(_scaled(heads, per_group) for heads in kv_heads)
    else:
        query_heads = dealt(config.num_heads, size)
    return Shard(
        rank=rank,
        size=size,
        query_heads=query_heads,
        kv_heads=kv_heads,
        ffn=dealt(config.ffn_size, size),
        hidden=dealt(config.hidden_size, size),
        vocab=dealt(config.vocab_size, size),
    )


def supported_sizes(config: DecoderConfig) -> list[int]:
    """Up to the KV heads any; beyond, multiples of them that deal each head's queries evenly."""
    per_group = config.num_heads // config.num_kv_heads
    copies = [count for count in range(2, per_group + 1) if per_group % count == 0]
    return [*range(1, config.num_kv_heads + 1), *(config.num_kv_heads * n for n in copies)]


def cuts_of(
    config: DecoderConfig, shard: Shard, split: Split, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Cut]:
    """The rank's part of every tensor in ``shapes``, by the names that checkpoints use."""
    if shard.size == 1:
        return dict.fromkeys(shapes, WHOLE)
    query = _scaled(shard.own(shard.query_heads), config.head_dim)
    key = _scaled(shard.own(shard.kv_heads), config.head_dim)
    ffn, hidden = shard.own(shard.ffn), shard.own(shard.hidden)
    by_output = split is Split.OUTPUT
    of_part = {
        "embed_tokens": Cut(rows=shard.own(shard.vocab)),
        "lm_head": Cut(rows=shard.own(shard.vocab)),
        "q_proj": Cut(rows=query),
        "k_proj": Cut(rows=key),
        "v_proj": Cut(rows=key),
        "gate_proj": Cut(rows=ffn),
        "up_proj": Cut(rows=ffn),
        "o_proj": Cut(rows=hidden) if by_output else Cut(columns=query),
        "down_proj": Cut(rows=hidden) if by_output else Cut(columns=ffn),
    }
    return {name: of_part.get(name.split(".")[-2], WHOLE) for name in shapes}


def share_of(shapes: Mapping[str, tuple[int, ...]], rank: int, size: int) -> set[str]:
    """Names dealt to ``rank`` so that every rank gets about as many bytes; the same everywhere."""
    loads = [0] * size
    share = set()
    for name in sorted(shapes, key=lambda name: (-prod(shapes[name]), name)):
        lightest = loads.index(min(loads))
        loads[lightest] += prod(shapes[name])
        if lightest == rank:
            share.add(name)
    return share


def _scaled(items: range, width: int) -> range:
    return range(items.start * width, items.stop * width)
