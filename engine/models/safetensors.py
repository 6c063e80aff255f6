"""Hugging Face directories: ``config.json`` and one or several safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from isthmus.common.errors import ModelFileError
from isthmus.engine.models.config import RawConfig, parse_config
from isthmus.engine.models.shard import WHOLE, Cut

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


class _File(Protocol):
    """What is used of ``safe_open``, which has no types of its own."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsCheckpoint:
    """Raises ModelFileError for a missing, truncated or contradictory file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = _read_config(folder)
        self._file_by_tensor: dict[str, _File] = {}
        for path in _weight_files(folder):
            file = _open(path)
            self._file_by_tensor |= dict.fromkeys(file.keys(), file)
        slices = {name: file.get_slice(name) for name, file in self._file_by_tensor.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(part.get_shape()) for name, part in slices.items()
        }
        kinds = {part.get_dtype() for part in slices.values()}
        self.dtype = "float32" if kinds == {"F32"} else "bfloat16"

    def read(self, name: str, cut: Cut = WHOLE) -> torch.Tensor:
        file = self._file_by_tensor[name]
        if cut is WHOLE:
            tensor = file.get_tensor(name)
        else:
            tensor = file.get_slice(name)[cut.slices(self.shapes[name])]
        if not tensor.is_floating_point():
            message = f"{self._folder}: tensor {name} is {tensor.dtype}; only GGUF may be quantised"
            raise ModelFileError(message, stage="load")
        return tensor

    def digest(self, name: str) -> bytes:
        stored = self._file_by_tensor[name].get_tensor(name).contiguous().view(torch.uint8)
        return xxhash.xxh3_128_digest(stored.numpy().data)


def _read_config(folder: Path) -> RawConfig:
    path = folder / "config.json"
    config = _read_json(path)
    generation = folder / "generation_config.json"
    if generation.is_file():  # its end tokens are the ones the model was tuned to stop at
        end = _read_json(generation).get("eos_token_id")
        config["eos_token_id"] = config.get("eos_token_id") if end is None else end
    return parse_config(config, source=str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {path}: {error}", stage="load") from error
    if not isinstance(data, dict):
        raise ModelFileError(f"{path} does not hold a JSON object", stage="load")
    return data


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
        raise ModelFileError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE} (pickled weights, which are not "
            f"read: {found})",
            stage="load",
        )
    try:
        shards = msgspec.convert(_read_json(index).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{index} has no usable weight_map: {error}", stage="load") from error
    files = [folder / name for name in sorted(set(shards.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelFileError(
            f"{folder} lacks {', '.join(missing)}, named in its index", stage="load"
        )
    return files


def _open(path: Path) -> _File:
    try:
        return cast("_File", safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is damaged or cut short: {error}", stage="load") from error
