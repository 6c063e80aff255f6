"""What a loader needs of a model on disk, whatever its format.

A checkpoint names its tensors as Hugging Face's Llama does and gives them in its own dtype, one at
a time. It keeps no tensor: the bytes stay in the page cache until they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from isthmus.common.errors import ModelFileError
from isthmus.engine.models.config import RawConfig


class Checkpoint(Protocol):
    name: str
    """A name for people, from the file's or folder's."""
    config: RawConfig
    dtype: str
    """``float32`` or ``bfloat16``: what ``auto`` means for this checkpoint."""
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> torch.Tensor:
        """On the CPU; a view of the file where its dtype allows."""
        ...

    def digest(self, name: str) -> bytes:
        """Of the tensor's bytes as they are stored; equal in every process."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads headers only. Raises ModelFileError, UnknownArchitectureError."""
    # Here, not above: each format builds on this module.
    from isthmus.engine.models.gguf import GgufCheckpoint
    from isthmus.engine.models.safetensors import SafetensorsCheckpoint

    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    what = "is neither a directory nor a .gguf file" if path.exists() else "does not exist"
    raise ModelFileError(
        f"model path {path} {what}; give a Hugging Face directory (config.json and safetensors), "
        "a .gguf file, or 'sample'",
        stage="load",
    )
