"""The longest sequence that a model can be asked for, as far as its files say so without torch.

An upper bound: where the rotary positions are stretched (yarn, dynamic) the engine, which has the
last word, may allow less. Kinds of stretching that this module does not know leave no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.common.errors import ModelFileError
from isthmus.common.gguf_file import read_gguf
from isthmus.common.model_files import ModelFiles, ModelKind

_PLAIN = (None, "none", "default", "linear", "llama3")
_STRETCHED = ("yarn", "dynamic")


def longest_sequence(files: ModelFiles) -> int | None:
    """Tokens; None when the files do not say. Raises ModelFileError."""
    if files.kind is ModelKind.GGUF:
        return _of_gguf(files.path)
    return _of_config(read_model_config(files.path))


def read_model_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a directory. Raises ModelFileError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {folder}/config.json: {error}", stage="load") from error
    if not isinstance(config, dict):
        raise ModelFileError(f"{folder}/config.json holds no mapping", stage="load")
    return config


def _of_config(config: Mapping[str, Any]) -> int | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return None
    original = "original_max_position_embeddings"
    return _bound(
        rope.get("rope_type") or rope.get("type"),
        (config.get("max_position_embeddings"), config.get(original), rope.get(original)),
        rope.get("factor"),
    )


def _of_gguf(path: Path) -> int | None:
    metadata = read_gguf(path).metadata
    family = metadata.get("general.architecture")
    lengths = ("context_length", "rope.scaling.original_context_length")
    return _bound(
        metadata.get(f"{family}.rope.scaling.type"),
        tuple(metadata.get(f"{family}.{key}") for key in lengths),
        metadata.get(f"{family}.rope.scaling.factor"),
    )


def _bound(scaling: object, lengths: tuple[object, ...], factor: object) -> int | None:
    """``lengths``: the model's own first, then those before it was stretched."""
    own = lengths[0]
    if not isinstance(own, int):
        return None
    if scaling in _PLAIN:
        return own
    if scaling in _STRETCHED and isinstance(factor, int | float):
        known = [length for length in lengths if isinstance(length, int)]
        return int(max(known) * max(1.0, factor))
    return None
