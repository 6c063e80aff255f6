"""The memory behind the block ids: one allocation per rank, registered with connectors once.

``tensor`` is [N, L, 2, G, B, D]: block-major, K before V, a head's tokens together. All layers of
one block are contiguous, so a block is one copy; see ``isthmus.common.kv_layout``. A quantised
store has ``scales`` [N, L, 2, G, B] too, which lie in the blocks, behind the vectors of each layer.

::

    one allocation    block 0 │ block 1 │ … │ block N − 1 │ staging

``staging`` is of whoever sends KV in another dtype: peers' writes do not go there, but connectors
read from it, so it is part of what they register.
"""

from __future__ import annotations

import os
import sys
import weakref

import torch

from isthmus.common.config import EngineConfig
from isthmus.common.errors import ConfigError
from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import SCALE_BYTES, KvLayout
from isthmus.common.shared_memory import has_huge_shared_pages
from isthmus.engine.models.types import ModelSpec
from isthmus.kernels.kv_views import block_views
from isthmus.kernels.memory import zeros_in_huge_pages, zeros_in_shared_memory

MIN_BLOCKS = 2  # the null block and one to use
_GIB = 2**30


def layout_of(spec: ModelSpec, block_size: int, kv_dtype: str = "auto") -> KvLayout:
    """``kv_dtype`` as ``engine.kv_dtype`` has it."""
    return KvLayout(
        model_fingerprint=spec.fingerprint,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=spec.dtype if kv_dtype == "auto" else kv_dtype,
        tp_rank=spec.tp_rank,
        tp_size=spec.tp_size,
        total_kv_heads=spec.total_kv_heads,
        windows=spec.layer_windows,
    )


def count_blocks(config: EngineConfig, layout: KvLayout, measured_bytes: int = 0) -> int:
    """Blocks of the store, the null block included. ConfigError when there is room for none.

    ``measured_bytes`` is what there is where the configuration leaves it open."""
    num_bytes = int(config.kv_cache_gib * _GIB) or measured_bytes
    num_blocks = config.num_blocks or num_bytes // layout.block_bytes
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"engine: {num_blocks} KV blocks of {layout.block_bytes} bytes are too few; "
            "raise num_blocks or kv_cache_gib",
            stage="engine",
        )
    return num_blocks


def is_shared(config: EngineConfig) -> bool:
    """Whether the store is to be memory that other processes can map. ConfigError where it cannot.

    With small pages attention over a cold store takes longer, so unless it must be shared it is
    only where shared memory has huge ones."""
    if config.kv_memory == "shared":
        if config.device != "cpu" or sys.platform != "linux":
            raise ConfigError(
                "engine.kv_memory: only host memory of Linux can be shared", stage="engine"
            )
        return True
    return config.kv_memory == "auto" and config.device == "cpu" and has_huge_shared_pages()


class KvStore:
    """Owns the bytes; never moves or resizes them, since peers write here by address.

    ``fd`` is of the memory file that peers map, open as long as the store; −1 = private memory."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: str,
        is_shared: bool = False,
        staging_bytes: int = 0,
    ) -> None:
        """Raises ConfigError for a layout whose scales would not be aligned."""
        if layout.num_planes * layout.layer_kv_bytes % SCALE_BYTES and layout.is_quantised:
            raise ConfigError(
                f"engine: {layout.block_size} tokens of {layout.num_kv_heads} heads of "
                f"{layout.head_dim} do not fill whole words in {layout.dtype}",
                stage="engine",
            )
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.block_bytes + staging_bytes
        self.fd = -1
        shape = (self.num_bytes,)
        if device != "cpu":
            self._memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        elif not is_shared:
            self._memory = zeros_in_huge_pages(shape, torch.uint8)
        else:
            self._memory, self.fd = zeros_in_shared_memory(shape, torch.uint8)
            weakref.finalize(self, os.close, self.fd)
        self.tensor, self.scales = block_views(self._memory, layout, num_blocks)

    @property
    def base_address(self) -> int:
        return self._memory.data_ptr()

    @property
    def memory(self) -> torch.Tensor:
        """Blocks and staging: uint8 [num_bytes]."""
        return self._memory

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def read_block(self, block_id: BlockId) -> bytes:
        """A copy of one block, ``block_bytes`` long."""
        start = block_id * self.block_bytes
        return self._memory[start : start + self.block_bytes].cpu().numpy().tobytes()
