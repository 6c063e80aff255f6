"""From a path to a model that can run.

Everything that can be wrong is found before the first weight is read: the architecture, the
tensors' names and shapes, the memory they need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from isthmus.common.config import DTypeName, ModelConfig
from isthmus.common.errors import ConfigError, ModelTooLargeError
from isthmus.common.memory import available_memory
from isthmus.common.model_files import ModelFiles, locate_model
from isthmus.engine.models import registry
from isthmus.engine.models.checkpoint import Checkpoint, open_checkpoint
from isthmus.engine.models.config import DecoderConfig, with_max_model_len
from isthmus.engine.models.decoder import Decoder
from isthmus.engine.models.rope import cos_sin_table
from isthmus.engine.models.types import LanguageModel, ModelSpec
from isthmus.engine.models.weights import (
    WeightReader,
    check_shapes,
    expected_shapes,
    fingerprint,
    num_weight_bytes,
    read_weights,
)
from isthmus.kernels import select

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint that has been checked and can be loaded."""

    files: ModelFiles
    checkpoint: Checkpoint
    config: DecoderConfig
    dtype: str
    weight_bytes: int

    def spec(self, served_name: str, digests: Mapping[str, bytes]) -> ModelSpec:
        config = self.config
        return ModelSpec(
            name=served_name or self.files.name,
            architecture=config.architecture,
            fingerprint=fingerprint(config, self.dtype, digests),
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            sliding_window=config.sliding_window,
            dtype=self.dtype,
            eos_token_ids=config.eos_token_ids,
            weight_bytes=self.weight_bytes,
        )


def load_spec(model: ModelConfig) -> ModelSpec:
    """What ``load_model`` would give, without loading; reads every byte once for the fingerprint.

    Raises the same errors, ModelTooLargeError apart.
    """
    source = _open(model)
    digests = {name: source.checkpoint.digest(name) for name in expected_shapes(source.config)}
    return source.spec(model.served_name, digests)


def load_model(model: ModelConfig, device: str, num_threads: int) -> LanguageModel:
    """Loads ``model`` onto ``device`` (``cpu``, ``cuda``, ``cuda:N``), for ``num_threads`` threads.

    Raises ModelFileError, UnknownArchitectureError, ModelTooLargeError; ConfigError for a device
    that is not there or a ``max_model_len`` beyond the model's.
    """
    source = _open(model)
    target = _checked_device(device)
    _check_fits(source, target)
    kernels = select(device, num_threads)
    reader = WeightReader(source.checkpoint, kernels, source.dtype, target)
    config = source.config
    weights = read_weights(config, reader, kernels)
    return Decoder(
        spec=source.spec(model.served_name, reader.digests),
        config=config,
        weights=weights,
        cos_sin=cos_sin_table(config.rope, config.head_dim, config.max_model_len).to(target),
        kernels=kernels,
    )


def _open(model: ModelConfig) -> _Source:
    files = locate_model(model.path)
    checkpoint = open_checkpoint(files)
    config = with_max_model_len(registry.configure(checkpoint.config), model.max_model_len)
    expected = expected_shapes(config)
    check_shapes(checkpoint.shapes, expected, source=str(files.path))
    dtype = _dtype(model.dtype, checkpoint)
    return _Source(files, checkpoint, config, dtype, num_weight_bytes(expected, dtype))


def _dtype(requested: DTypeName, checkpoint: Checkpoint) -> str:
    return checkpoint.dtype if requested == "auto" else requested


def _checked_device(device: str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown: {error}", stage="load") from error
    if target.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device {device!r} is not supported; supported: cpu, cuda:N")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        present = torch.cuda.device_count()
        raise ConfigError(f"device {device!r} is not there; CUDA devices present: {present}")
    return target


def _check_fits(source: _Source, device: torch.device) -> None:
    config = source.config
    needed = source.weight_bytes + 4 * config.max_model_len * config.head_dim  # the rotary table
    available = _available_bytes(device)
    if needed > available:
        raise ModelTooLargeError(
            f"{source.files.name} needs {needed / _GIB:.2f} GiB for weights in {source.dtype} "
            f"and {config.max_model_len} positions; "
            f"{available / _GIB:.2f} GiB are available on {device}",
            stage="load",
        )


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()
