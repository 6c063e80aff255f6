"""Memory as torch's operations see it: pieces are packed into one tensor to travel, and unpacked
where they belong. In host memory by plain copies, elsewhere by torch."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch

from isthmus.kvtransfer.connectors.copying import copy_rows
from isthmus.kvtransfer.connectors.device_bytes import DeviceBytes
from isthmus.kvtransfer.connectors.headers import with_packed
from isthmus.kvtransfer.copies import Rows
from isthmus.kvtransfer.interface import MemoryRegion

_LOOK_S = 0.0002
_COPY_S = 30.0  # far more than copies within a device take


class Memory(Protocol):
    num_bytes: int
    device: str

    def in_own_order(self) -> AbstractContextManager[object]:
        """What this thread asks of the device inside waits for nothing that others ask of it."""
        ...

    def settle(self, timeout_s: float) -> None:
        """Blocks until the device has done what this thread has asked of it. Raises TimeoutError
        when that takes longer, as it does while the other end has stopped."""
        ...

    def empty(self, num_bytes: int) -> torch.Tensor:
        """A place for bytes on their way: uint8, on the same device."""
        ...

    def pack(self, rows: Rows) -> torch.Tensor:
        """The bytes of ``rows[:, 0]``, ``rows[:, 2]`` long each, one after another; all have been
        read when this returns."""
        ...

    def unpack(self, packed: torch.Tensor, rows: Rows) -> None:
        """Puts them at ``rows[:, 1]``; they are there when this returns."""
        ...


def memory_of(region: MemoryRegion) -> Memory:
    return HostMemory(region) if region.device == "cpu" else TorchMemory(_bytes_at(region))


class HostMemory:
    def __init__(self, region: MemoryRegion) -> None:
        self._base = region.base_address
        self.num_bytes = region.num_bytes
        self.device = "cpu"

    def in_own_order(self) -> AbstractContextManager[object]:
        return nullcontext()

    def settle(self, timeout_s: float) -> None:
        """Nothing is left to be done when an operation on host memory returns."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pack(self, rows: Rows) -> torch.Tensor:
        packed = self.empty(int(rows[:, 2].sum()))
        copy_rows(with_packed(rows, column=1), self._base, packed.data_ptr())
        return packed

    def unpack(self, packed: torch.Tensor, rows: Rows) -> None:
        copy_rows(with_packed(rows, column=0), packed.data_ptr(), self._base)


class TorchMemory:
    def __init__(self, flat: torch.Tensor) -> None:
        """``flat`` is uint8, one-dimensional: all of the memory."""
        self._flat = flat
        self.num_bytes = flat.numel()
        self.device = str(flat.device)
        self._is_asynchronous = flat.device.type == "cuda"

    def in_own_order(self) -> AbstractContextManager[object]:
        if not self._is_asynchronous:
            return nullcontext()
        cuda: Any = torch.cuda
        return cast("AbstractContextManager[object]", cuda.stream(cuda.Stream(self._flat.device)))

    def settle(self, timeout_s: float) -> None:
        if not self._is_asynchronous:
            return
        cuda: Any = torch.cuda  # parts of it have no types
        passed = cuda.Event()
        passed.record(cuda.current_stream(self._flat.device))
        deadline_s = time.monotonic() + timeout_s
        while not passed.query():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the device was not done within {timeout_s:.0f} s")
            time.sleep(_LOOK_S)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._flat.device)

    def pack(self, rows: Rows) -> torch.Tensor:
        pieces = [self._flat[start : start + size] for start, _, size in rows.tolist()]
        packed = torch.cat(pieces) if pieces else self.empty(0)
        self.settle(_COPY_S)
        return packed

    def unpack(self, packed: torch.Tensor, rows: Rows) -> None:
        start = 0
        for _, target, size in rows.tolist():
            self._flat[target : target + size].copy_(packed[start : start + size])
            start += size
        self.settle(_COPY_S)


def _bytes_at(region: MemoryRegion) -> torch.Tensor:
    there = DeviceBytes(region.base_address, region.num_bytes)
    return torch.as_tensor(there, device=region.device)
