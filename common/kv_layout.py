"""Everything that shapes the bytes of a KV block.

The store of one rank is block-major: ``[num_blocks, num_layers, 2, num_kv_heads, block_size,
head_dim]``, K before V. One block of all layers is one contiguous piece (one descriptor for a
whole-block copy), one layer of a block is contiguous inside it (layer-wise push), and a head range
of one layer's K or V is contiguous inside that (copies between unlike tensor-parallel sizes).

Latents (kind "mla") are one vector per token and layer, ``[num_blocks, num_layers, 1, 1,
block_size, head_dim]``, the same on every rank.

KV in one byte an element (int8, fp8_e4m3) has a float32 scale for each vector, and a layer of a
block carries its own, behind its vectors::

    layer of a block   K [G, B, D] │ V [G, B, D] │ scales of K [G, B] │ scales of V [G, B]

Each of these parts is a *plane*: vectors of so many bytes for each head and token. Whatever is done
to bytes (copies, checksums, counting blocks) goes by planes and needs to know of no dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1}
QUANTISED = frozenset({"int8", "fp8_e4m3"})
SCALE_BYTES = 4  # float32
ORDER = "HND"
# Kind → vectors per token, layer and head.
PLANES = {"mha": 2, "mla": 1}
# Dtype of a sender → others that it can make of its KV on the way. Only to fewer bytes: what a
# quantised store has lost cannot be sent.
CONVERSIONS = {
    "float32": frozenset({"bfloat16"}) | QUANTISED,
    "bfloat16": QUANTISED,
}


def can_feed(source_dtype: str, target_dtype: str) -> bool:
    """Whether KV of one dtype can become a receiver's KV of another."""
    return source_dtype == target_dtype or target_dtype in CONVERSIONS.get(source_dtype, ())


def fed_dtypes(source_dtype: str) -> tuple[str, ...]:
    """All that KV of ``source_dtype`` can become, itself first."""
    return (source_dtype, *sorted(CONVERSIONS.get(source_dtype, ())))


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
class Plane:
    """Vectors of one layer of a block: ``[num_kv_heads, block_size, vector_bytes]`` from ``offset``
    (in the layer) on."""

    offset: int
    vector_bytes: int


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
    order: str = ORDER
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
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of the K (or the V, or the latents) of one layer of one block, without scales."""
        return self.num_kv_heads * self.block_size * self.vector_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer (K and V, and their scales) of one block."""
        scales = self.num_kv_heads * self.block_size * SCALE_BYTES if self.is_quantised else 0
        return self.num_planes * (self.layer_kv_bytes + scales)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """What one layer of a block is made of, in the order of its bytes."""
        sizes = (self.vector_bytes, SCALE_BYTES) if self.is_quantised else (self.vector_bytes,)
        planes: list[Plane] = []
        offset = 0
        for vector_bytes in (size for size in sizes for _ in range(self.num_planes)):
            planes.append(Plane(offset, vector_bytes))
            offset += self.num_kv_heads * self.block_size * vector_bytes
        return tuple(planes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all local layers."""
        return self.num_layers * self.layer_bytes

    def first_needed(self, num_tokens: int) -> tuple[int, ...]:
        """Per layer the first token of a prompt of ``num_tokens`` that is still looked at from the
        next position on: 0 without a window."""
        windows = (*self.windows, *(0,) * (self.num_layers - len(self.windows)))
        return tuple(max(0, num_tokens + 1 - window) if window else 0 for window in windows)

    def unmoved_tokens(self, num_tokens: int) -> int:
        """How many tokens at the start of a transferred prompt some layer has no KV of: they are in
        blocks that have left its window. 0 without windows."""
        needed = max(self.first_needed(num_tokens), default=0)
        return needed // self.block_size * self.block_size

    @property
    def instance_token_bytes(self) -> int:
        """KV of one token on all ranks of the instance, which is what a transfer to it moves."""
        num_heads = max(self.model_kv_heads, self.tp_size)  # each copy of a head counts
        return self.block_bytes // self.num_kv_heads * num_heads // self.block_size

    @property
    def problem(self) -> str:
        """Why this version can do nothing with a store that another process describes so; empty
        when it can."""
        if self.kind not in PLANES or self.order != ORDER:
            return f"kind {self.kind} in order {self.order} is not known here"
        if self.dtype not in DTYPE_BYTES:
            return f"dtype {self.dtype} is not known here"
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size) < 1:
            return (
                f"{self.num_layers} layers of {self.num_kv_heads} heads of {self.head_dim}, "
                f"block_size {self.block_size}"
            )
        try:
            heads = self.heads
        except (ValueError, IndexError, ZeroDivisionError) as error:
            return f"rank {self.tp_rank} of {self.tp_size}: {error}"
        if len(heads) != self.num_kv_heads:
            return (
                f"rank {self.tp_rank} of {self.tp_size} holds {self.num_kv_heads} KV heads, "
                f"expected {len(heads)} of {self.model_kv_heads}"
            )
        return ""

    @property
    def compat_hash(self) -> str:
        """Digest of the fields that two ends must agree on. How tokens are cut into blocks and
        heads are dealt to ranks is each end's own affair: copies are planned between any two. So is
        the dtype, as far as one converts into the other: see ``difference``."""
        parts = [value for _, value in self._agreed()]
        return xxhash.xxh3_128_hexdigest("|".join(str(part) for part in parts).encode())

    def difference(self, other: KvLayout) -> str:
        """Names the fields that two ends must agree on and do not, for an operator to read."""
        pairs = zip(self._agreed(), other._agreed(), strict=True)
        return ", ".join(f"{name}: {a} here, {b} there" for (name, a), (_, b) in pairs if a != b)

    def cannot_feed(self, target: KvLayout) -> str:
        """Why KV of this dtype cannot become ``target``'s; empty when it can."""
        if can_feed(self.dtype, target.dtype):
            return ""
        reason = f"dtype: KV in {self.dtype} cannot be sent to a store in {target.dtype}"
        return f"{reason} (it would have to be restored)" if self.is_quantised else reason

    def _agreed(self) -> tuple[tuple[str, object], ...]:
        return (
            ("model_fingerprint", self.model_fingerprint),
            ("num_layers", self.num_layers),
            ("head_dim", self.head_dim),
            ("kind", self.kind),
            ("order", self.order),
            ("kv_heads", self.model_kv_heads),
            ("windows", self.windows),
        )
