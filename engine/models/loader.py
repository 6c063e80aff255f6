"""From a path to a model that can run.

Everything that can be wrong is found before the first weight is read: the architecture, the
tensors' names and shapes, the memory they need. The ranks of an instance read their own parts at
the same time; the digests that the fingerprint is made of are dealt among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from isthmus.common.config import DTypeName, ModelConfig
from isthmus.common.errors import ConfigError, ModelTooLargeError
from isthmus.common.memory import available_memory
from isthmus.common.model_files import ModelFiles, locate_model
from isthmus.engine.models import registry
from isthmus.engine.models.checkpoint import Checkpoint, open_checkpoint
from isthmus.engine.models.config import DecoderConfig, with_max_model_len
from isthmus.engine.models.decoder import Decoder
from isthmus.engine.models.parallel import Parallel
from isthmus.engine.models.rope import cos_sin_table
from isthmus.engine.models.shard import Cut, Shard, Split, cuts_of, shard_of, share_of
from isthmus.engine.models.types import LanguageModel, ModelSpec
from isthmus.engine.models.weights import (
    WeightReader,
    check_shapes,
    expected_shapes,
    fingerprint,
    num_weight_bytes,
    read_weights,
)
from isthmus.engine.tp_group import LEADER, SingleRank, TpGroup
from isthmus.kernels import select
from isthmus.kernels.types import Quantization

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint that has been checked and can be loaded."""

    files: ModelFiles
    checkpoint: Checkpoint
    config: DecoderConfig
    dtype: str
    quantization: Quantization
    shard: Shard
    cuts: Mapping[str, Cut]

    @property
    def weight_bytes(self) -> int:
        """Of this rank."""
        expected = expected_shapes(self.config)
        parts = {name: self.cuts[name].shape_of(shape) for name, shape in expected.items()}
        return num_weight_bytes(parts, self.dtype, self.quantization)

    def spec(self, served_name: str, digests: Mapping[str, bytes]) -> ModelSpec:
        config, shard = self.config, self.shard
        return ModelSpec(
            name=served_name or self.files.name,
            architecture=config.architecture,
            fingerprint=fingerprint(config, self.dtype, digests, self.quantization),
            num_layers=config.num_layers,
            num_heads=len(shard.own(shard.query_heads)),
            num_kv_heads=len(shard.own(shard.kv_heads)),
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            sliding_window=config.sliding_window,
            dtype=self.dtype,
            eos_token_ids=config.eos_token_ids,
            weight_bytes=self.weight_bytes,
            tp_rank=shard.rank,
            tp_size=shard.size,
            total_kv_heads=config.num_kv_heads,
            layer_windows=config.kv_windows,
        )


def load_spec(model: ModelConfig) -> ModelSpec:
    """What ``load_model`` would give, without loading; reads every byte once for the fingerprint.

    Raises the same errors, ModelTooLargeError apart.
    """
    source = _open(model, SingleRank(), Split.OUTPUT)
    digests = {name: source.checkpoint.digest(name) for name in expected_shapes(source.config)}
    return source.spec(model.served_name, digests)


def load_model(
    model: ModelConfig,
    device: str,
    num_threads: int,
    group: TpGroup | None = None,
    split: Split | None = None,
    kernels_by_op: Mapping[str, str] | None = None,
) -> LanguageModel:
    """Loads ``model`` onto ``device`` (``cpu``, ``cuda``, ``cuda:N``), for ``num_threads`` threads.

    With a ``group``, the part of this rank, while every other rank loads its own. ``split`` None =
    what suits the device: on the CPU, where tokens must not depend on placement, OUTPUT.
    ``kernels_by_op`` names implementations as ``engine.kernels`` does.

    Raises ModelFileError, UnknownArchitectureError, ModelTooLargeError; ConfigError for a device
    that is not there, a ``max_model_len`` beyond the model's, a number of ranks that its heads
    cannot be dealt to or kernels that are not to be had; InstanceLostError when another rank ends
    meanwhile.
    """
    group = group or SingleRank()
    target = _checked_device(device)
    split = split or (Split.OUTPUT if target.type == "cpu" else Split.INPUT)
    if model.quantization != "none" and target.type != "cpu":
        raise ConfigError(f"weights in {model.quantization} are for the CPU; device is {device!r}")
    source = _open(model, group, split)
    _check_fits(source, target)
    kernels = select(device, num_threads, overrides=kernels_by_op)
    config = source.config
    to_digest = share_of(expected_shapes(config), group.rank, group.size)
    reader = WeightReader(
        *(source.checkpoint, kernels, source.dtype, target, source.cuts, to_digest),
        model.quantization,
    )
    adds_bias = split is Split.OUTPUT or group.rank == LEADER
    weights = read_weights(config, reader, adds_bias=adds_bias)
    return Decoder(
        spec=source.spec(model.served_name, _all_digests(reader.digests(), group)),
        config=config,
        weights=weights,
        cos_sin=cos_sin_table(config.rope, config.head_dim, config.max_model_len).to(target),
        kernels=kernels,
        parallel=Parallel(group, source.shard, split),
    )


def _all_digests(own: Mapping[str, bytes], group: TpGroup) -> dict[str, bytes]:
    """Of all tensors: each rank has taken those of its share."""
    merged: dict[str, bytes] = {}
    for payload in group.exchange(msgspec.msgpack.encode(own)):
        merged |= msgspec.msgpack.decode(payload, type=dict[str, bytes])
    return merged


def _open(model: ModelConfig, group: TpGroup, split: Split) -> _Source:
    files = locate_model(model.path)
    checkpoint = open_checkpoint(files)
    config = with_max_model_len(registry.configure(checkpoint.config), model.max_model_len)
    expected = expected_shapes(config)
    check_shapes(checkpoint.shapes, expected, source=str(files.path))
    shard = shard_of(config, group.rank, group.size)
    cuts = cuts_of(config, shard, split, expected)
    dtype = _dtype(model.dtype, checkpoint)
    return _Source(files, checkpoint, config, dtype, model.quantization, shard, cuts)


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
