"""Everything that shapes the bytes of a KV block.

The store of one rank is block-major: ``[num_blocks, num_layers, 2, num_kv_heads, block_size,
head_dim]``, K before V. One block of all layers is one contiguous piece (one descriptor for a
whole-block copy), one layer of a block is contiguous inside it (layer-wise push), and a head range
of one layer's K or V is contiguous inside that (copies between unlike tensor-parallel sizes).

Latents (kind "mla") are one vector per token and layer, ``[num_blocks, num_layers, 1, 1,
block_size, head_dim]``, the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Kind → vectors per token, layer and head.
PLANES = {"mha": 2, "mla": 1}


def head_ranges(num_heads: int, num_ranks: int) -> tuple[range, ...]:
    """The KV heads of each rank: contiguous, in the order of the ranks, the longer ranges first.

    With more ranks than heads every head is on the same number of neighbouring ranks::

        3 heads on 2 ranks   [0 1] [2]
        2 heads on 4 ranks   [0] [0] [1] [1]

    Raises ValueError when the heads cannot be dealt like that.
    """
    if num_ranks > num_heads:
        copies, rest = divmod(num_ranks, num_heads)
        if rest:
            raise ValueError(f"{num_heads} KV heads cannot be dealt to {num_ranks} ranks")
        return tuple(range(rank // copies, rank // copies + 1) for rank in range(num_ranks))
    return dealt(num_heads, num_ranks)


def dealt(total: int, num_parts: int) -> tuple[range, ...]:
    """``total`` in ranges whose lengths differ by one at most, the longer ones first."""
    bounds = [-(-total * part // num_parts) for part in range(num_parts + 1)]
    return tuple(range(start, end) for start, end in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class KvLayout:
    model_fingerprint: str
    """Digest of configuration and weights: equal only where KV values mean the same."""
    num_layers: int
    num_kv_heads: int
    """Local heads of this rank."""
    head_dim: int
    block_size: int
    dtype: str
    kind: str = "mha"
    order: str = "HND"
    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 0
    """Of the model, each counted once; 0 = ``num_kv_heads * tp_size``."""
    windows: tuple[int, ...] = ()
    """Per layer how many of the last tokens it looks at, 0 = all; () = all of all layers."""

    @property
    def model_kv_heads(self) -> int:
        return self.total_kv_heads or self.num_kv_heads * self.tp_size

    @property
    def heads(self) -> range:
        """The model's KV heads that this rank holds. ValueError when they cannot be dealt."""
        return head_ranges(self.model_kv_heads, self.tp_size)[self.tp_rank]

    @property
    def num_planes(self) -> int:
        """2 for K and V, 1 for a latent."""
        return PLANES[self.kind]

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def vector_bytes(self) -> int:
        """Bytes of the K (or the V) of one token and head in one layer."""
        return self.head_dim * self.dtype_bytes

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of the K (or the V, or the latents) of one layer of one block."""
        return self.num_kv_heads * self.block_size * self.vector_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer (K and V) of one block."""
        return self.num_planes * self.layer_kv_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all local layers."""
        return self.num_layers * self.layer_bytes

    @property
    def instance_token_bytes(self) -> int:
        """KV of one token on all ranks of the instance, which is what a transfer to it moves."""
        num_heads = max(self.model_kv_heads, self.tp_size)  # each copy of a head counts
        return self.block_bytes // self.num_kv_heads * num_heads // self.block_size

    @property
    def compat_hash(self) -> str:
        """Digest of the fields that two ends must agree on. How tokens are cut into blocks and
        heads are dealt to ranks is each end's own affair: copies are planned between any two."""
        parts = [value for _, value in self._agreed()]
        return xxhash.xxh3_128_hexdigest("|".join(str(part) for part in parts).encode())

    def difference(self, other: KvLayout) -> str:
        """Names the fields that two ends must agree on and do not, for an operator to read."""
        pairs = zip(self._agreed(), other._agreed(), strict=True)
        return ", ".join(f"{name}: {a} here, {b} there" for (name, a), (_, b) in pairs if a != b)

    def _agreed(self) -> tuple[tuple[str, object], ...]:
        return (
            ("model_fingerprint", self.model_fingerprint),
            ("num_layers", self.num_layers),
            ("head_dim", self.head_dim),
            ("dtype", self.dtype),
            ("kind", self.kind),
            ("order", self.order),
            ("kv_heads", self.model_kv_heads),
            ("windows", self.windows),
        )
