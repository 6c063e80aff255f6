"""Everything that shapes the bytes of a KV block.

The store of one rank is block-major: ``[num_blocks, num_layers, 2, num_kv_heads, block_size,
head_dim]``, K before V. One block of all layers is one contiguous piece (one descriptor for a
whole-block copy), one layer of a block is contiguous inside it (layer-wise push), and a head range
of one layer's K or V is contiguous inside that (copies between unlike tensor-parallel sizes).
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of the K (or the V) of one layer of one block."""
        return self.num_kv_heads * self.block_size * self.head_dim * self.dtype_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer (K and V) of one block."""
        return 2 * self.layer_kv_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all local layers."""
        return self.num_layers * self.layer_bytes

    @property
    def compat_hash(self) -> str:
        """Digest of the fields that two ends must agree on, tensor-parallel placement apart."""
        parts = (
            self.model_fingerprint,
            self.num_layers,
            self.num_kv_heads * self.tp_size,
            self.head_dim,
            self.block_size,
            self.dtype,
            self.kind,
            self.order,
        )
        return xxhash.xxh3_128_hexdigest("|".join(str(part) for part in parts).encode())

    def difference(self, other: KvLayout) -> str:
        """Names the fields in which two layouts disagree, for an operator to read."""
        names = ("model_fingerprint", "num_layers", "head_dim", "block_size", "dtype", "kind")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in (*names, "order")]
        pairs.append(
            ("kv_heads", self.num_kv_heads * self.tp_size, other.num_kv_heads * other.tp_size)
        )
        return ", ".join(f"{name}: {a} here, {b} there" for name, a, b in pairs if a != b)
