"""What a step asks of an accelerator beside tensors: pinned memory, events, captured graphs.

``CudaDevice`` is the real one. ``HostDevice`` keeps the same promises with CPU tensors, where every
operation is over when its call returns; with it all the code around a device runs without one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

Forward = Callable[[], torch.Tensor]


class DeviceEvent(Protocol):
    """A point in the device's queue of work."""

    def record(self) -> None:
        """Puts the point behind all that was launched so far."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until the device has passed the point; at once if it was not recorded."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the point. From any thread; does not wait."""
        ...


class Device(Protocol):
    torch_device: torch.device

    def active(self) -> AbstractContextManager[object]:
        """What launches work runs inside this: the current device is a thread's own."""
        ...

    def pinned(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed host tensor that is copied to and from the device without a stop."""
        ...

    def event(self) -> DeviceEvent: ...

    def capture(self, forward: Forward) -> Forward:
        """Records what ``forward`` launches, which is run for that. What comes back launches it
        again, reading and writing the same memory."""
        ...


class CudaDevice:
    """All graphs share one memory pool: they may use the same addresses for what they make, so of
    that nothing is good beyond the next replay of any."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._pool = torch.cuda.graph_pool_handle()

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.torch_device)

    def pinned(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, pin_memory=True)

    def event(self) -> DeviceEvent:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def capture(self, forward: Forward) -> Forward:
        # Nothing may be compiled or loaded while a graph is recorded: run first, beside the
        # stream of the others, as torch's notes on CUDA graphs ask for.
        stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream(self.torch_device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class _Passed:
    """An event of a device that is never behind."""

    def record(self) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        return True


class HostDevice:
    """A ``Device`` of CPU tensors. Its graphs are the code itself, run again."""

    torch_device = torch.device("cpu")

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def pinned(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype)

    def event(self) -> DeviceEvent:
        return _Passed()

    def capture(self, forward: Forward) -> Forward:
        forward()
        return forward


def device_of(name: str) -> Device:
    """``cpu``, ``cuda`` or ``cuda:N``."""
    torch_device = torch.device(name)
    if torch_device.type == "cpu":
        return HostDevice()
    return CudaDevice(torch.device(torch_device.type, torch_device.index or 0))
