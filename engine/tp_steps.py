"""A step on all ranks of an instance: the leader says what runs, every rank runs its part.

::

    leader     plan ─ batch ─┬─ message n ──▶ followers        forward ∥ forward ∥ … ─ sample
                             └─ its own part                   (they meet inside: ``tp_group``)

Only the leader schedules and samples. All ranks have the same number of KV blocks and the same
block tables, so the batch of the forward pass is all that a follower needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import torch

from isthmus.common.config import EngineConfig
from isthmus.common.errors import InstanceLostError, InternalError
from isthmus.common.layer_progress import LayerMarks
from isthmus.engine.device import Device, device_of
from isthmus.engine.kv_store import KvStore, layout_of
from isthmus.engine.models.types import ForwardBatch, LanguageModel, ModelSpec
from isthmus.engine.tp_group import TpGroup

_GIB = 2**30


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """``values`` are the fields of ``ForwardBatch``, in their order."""

    number: int
    values: tuple[_Array | int | None, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepMessage)


def encode_step(number: int, batch: ForwardBatch) -> bytes:
    """``batch`` on the host."""
    values = (getattr(batch, field.name) for field in fields(ForwardBatch))
    return _encoder.encode(StepMessage(number, tuple(map(_packed, values))))


def decode_step(payload: bytes) -> tuple[int, ForwardBatch]:
    """The step's number and its batch, on the host."""
    message = _decoder.decode(payload)
    return message.number, _batch(map(_unpacked, message.values))


def _packed(value: torch.Tensor | int | None) -> _Array | int | None:
    if not isinstance(value, torch.Tensor):
        return value
    array = value.numpy()
    return _Array(array.dtype.str, array.shape, array.tobytes())


def _unpacked(value: _Array | int | None) -> torch.Tensor | int | None:
    if not isinstance(value, _Array):
        return value
    array = np.empty(value.shape, dtype=value.dtype)
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(value.data, dtype=np.uint8)
    return torch.from_numpy(array)


class AllRanksMarks:
    """``LayerMarks`` for a leader's part that tells ``marks`` of all ranks. When the leader's KV of
    a layer is final, so is everyone's of the layer before: in between all have met."""

    address = 0  # the count is another one than the leader's own

    def __init__(self, marks: LayerMarks) -> None:
        self._marks = marks

    def mark(self, num_layers: int) -> None:
        self._marks.mark(num_layers - 1)


class LeaderModel:
    """A ``LanguageModel`` over all ranks: tells the followers, then runs the leader's part.

    Batches and logits are on the host, whatever the ranks' devices, and with the logits the batch's
    KV is in the stores of all ranks. After a pass that failed the ranks are out of step, so the
    failure is the instance's: InstanceLostError.
    """

    def __init__(self, model: LanguageModel, tell: Callable[[bytes], None], device: str) -> None:
        self.spec: ModelSpec = model.spec
        self._model = model
        self._tell = tell
        self._device = device_of(device)
        self._number = 0

    def forward(
        self,
        batch: ForwardBatch,
        kv: torch.Tensor,
        marks: LayerMarks | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``marks`` learns when a layer's KV is in the stores of all ranks; on devices it hears
        nothing, as their work is not done when the host says so. Raises InstanceLostError."""
        for_all = None
        if marks is not None and self._device.torch_device.type == "cpu":
            for_all = AllRanksMarks(marks)
        self._number += 1
        try:
            self._tell(encode_step(self._number, batch))
            with self._device.active():
                batch = on_device(batch, self._device)
                logits = self._model.forward(batch, kv, for_all, kv_scales).cpu()
                # Where there are no logits, nothing has waited for the device yet.
                passed = self._device.event()
                passed.record()
                passed.synchronize()
                return logits
        except InstanceLostError:
            raise
        except Exception as error:
            raise InstanceLostError(f"a step failed on one of several ranks: {error}") from error


class Follower:
    """One rank's model and KV. It runs what the leader says, and checks that nothing is missed."""

    def __init__(self, model: LanguageModel, store: KvStore, device: str) -> None:
        self.weight_bytes = model.spec.weight_bytes
        self._model = model
        self._store = store
        self._device = device_of(device)
        self._number = 0

    def run(self, payload: bytes) -> None:
        """One step. Raises InternalError for a step out of turn, and what the model raises."""
        number, batch = decode_step(payload)
        if number != self._number + 1:
            message = f"step {number} came after step {self._number}"
            raise InternalError(message, stage="step")
        self._number = number
        with self._device.active():
            store = self._store
            batch = on_device(batch, self._device)
            self._model.forward(batch, store.tensor, kv_scales=store.scales)


def on_device(batch: ForwardBatch, device: Device) -> ForwardBatch:
    if device.torch_device.type == "cpu":
        return batch
    values = (getattr(batch, field.name) for field in fields(ForwardBatch))
    moved = (v.to(device.torch_device) if isinstance(v, torch.Tensor) else v for v in values)
    return _batch(moved)


def _batch(values: Iterable[Any]) -> ForwardBatch:
    return ForwardBatch(*values)


def common_num_blocks(config: EngineConfig, spec: ModelSpec, group: TpGroup) -> int:
    """KV blocks of every rank: so many that all ranks' together take ``kv_cache_gib``."""
    own = layout_of(spec, config.block_size, config.kv_dtype).block_bytes
    sizes = [int.from_bytes(part) for part in group.exchange(own.to_bytes(8))]
    return config.num_blocks or max(1, int(config.kv_cache_gib * _GIB) // sum(sizes))
