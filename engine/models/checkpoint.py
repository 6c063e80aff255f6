"""What a loader needs of a model on disk, whatever its format.

A checkpoint names its tensors as Hugging Face's Llama does and gives them in its own dtype, one at
a time, whole or the part that one rank holds. It keeps no tensor: the bytes stay in the page cache
until they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from isthmus.common.model_files import ModelFiles, ModelKind
from isthmus.engine.models.config import RawConfig
from isthmus.engine.models.shard import WHOLE, Cut


class Checkpoint(Protocol):
    config: RawConfig
    dtype: str
    """``float32`` or ``bfloat16``: what ``auto`` means for this checkpoint."""
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, cut: Cut = WHOLE) -> torch.Tensor:
        """On the CPU; a view of the file where its dtype allows. Only the bytes of ``cut`` are
        kept, and only they are read where the format allows."""
        ...

    def digest(self, name: str) -> bytes:
        """Of all the tensor's bytes as they are stored; equal in every process."""
        ...


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Reads headers only. Raises ModelFileError, UnknownArchitectureError."""
    # Here, not above: only the format at hand needs its library.
    if files.kind is ModelKind.GGUF:
        from isthmus.engine.models.gguf import GgufCheckpoint

        return GgufCheckpoint(files.path)
    from isthmus.engine.models.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.path)
