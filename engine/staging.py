"""The memory through which a step's arrays get to the device and its results back, without a stop.

::

    host array ──▶ pinned[turn] ──copy──▶ device buffer        ``Staging``: one for each input
    device tensor ──copy──▶ pinned[turn] ──▶ host array        ``Readback``: one for each result

Two turns: a pinned buffer that step n's copy reads may still be in use while step n + 1 is staged.
The device's buffers exist once, at fixed addresses, as graphs need them: copies queue up behind the
step that reads them. Arrays of the usual sizes are never allocated for after construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.engine.device import Device

TURNS = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """How many elements of which type at most."""

    num_elements: int
    dtype: torch.dtype


class Staging:
    """Used by the engine thread alone: ``begin``, any number of ``put``, ``end``."""

    def __init__(self, device: Device, buffers: Mapping[str, Buffer]) -> None:
        self._device = device
        self._on_device = {
            name: torch.zeros(b.num_elements, dtype=b.dtype, device=device.torch_device)
            for name, b in buffers.items()
        }
        self._pinned = [
            {name: device.pinned(b.num_elements, b.dtype) for name, b in buffers.items()}
            for _ in range(TURNS)
        ]
        self._copied = [device.event() for _ in range(TURNS)]
        self._turn = 0

    def begin(self) -> None:
        """Takes the other turn; waits for its copies, which were over long ago unless the device
        is two steps behind."""
        self._turn = (self._turn + 1) % TURNS
        self._copied[self._turn].synchronize()

    def put(self, name: str, array: NDArray[np.generic]) -> torch.Tensor:
        """Copies an array of the buffer's type; a device tensor of the same shape, good until the
        next ``put`` of this name: one a turn. What is larger than the buffer gets memory of its
        own, at another address."""
        pinned, on_device = self._pinned[self._turn][name], self._on_device[name]
        length = array.size
        if length > len(pinned):
            pinned = self._device.pinned(length, pinned.dtype)
            on_device = torch.empty_like(pinned, device=on_device.device)
        pinned.numpy()[:length] = array.reshape(-1)
        target = on_device[:length]
        target.copy_(pinned[:length], non_blocking=True)
        return target.view(array.shape)

    def end(self) -> None:
        """All arrays of this turn are on their way."""
        self._copied[self._turn].record()


class Readback:
    """Results on their way to the host. At most TURNS − 1 others may be unread at a ``begin``."""

    def __init__(self, device: Device, buffers: Mapping[str, Buffer]) -> None:
        self._device = device
        self._pinned = [
            {name: device.pinned(b.num_elements, b.dtype) for name, b in buffers.items()}
            for _ in range(TURNS)
        ]
        self._arrived = [device.event() for _ in range(TURNS)]
        self._turn = 0

    def begin(self) -> int:
        """The turn that ``take`` and the results of this step are for."""
        self._turn = (self._turn + 1) % TURNS
        return self._turn

    def put(self, name: str, tensor: torch.Tensor) -> NDArray[np.generic]:
        """Sends a tensor; the host array that it will be in once ``wait`` returns, until the turn
        comes round again. One larger than the buffer gets memory of its own."""
        length = tensor.numel()
        buffer = self._pinned[self._turn][name]
        if length > len(buffer):
            return self.send(tensor)
        return _sent(tensor, buffer[:length])

    def send(self, tensor: torch.Tensor) -> NDArray[np.generic]:
        """As ``put``, in memory of its own."""
        return _sent(tensor, self._device.pinned(tensor.numel(), tensor.dtype))

    def end(self) -> None:
        self._arrived[self._turn].record()

    def wait(self, turn: int) -> None:
        """Until the results of that turn are on the host: the only wait of a step."""
        self._arrived[turn].synchronize()


def _sent(tensor: torch.Tensor, target: torch.Tensor) -> NDArray[np.generic]:
    target.copy_(tensor.reshape(-1), non_blocking=True)
    return target.view(tensor.shape).numpy()
