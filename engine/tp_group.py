"""The ranks of one instance as a group: each computes a part, and the others need it.

Every rank runs the same operations in the same order on tensors with the same number of rows, so
nothing here says who calls. On CPUs a rank that is gone, or that does not come within the group's
timeout, ends the operation of all others with InstanceLostError; on GPUs an operation is only put
into the device's queue, and its failure shows when the host next waits for the device. A group that
failed once is not used again.

On CPUs sums have one order, that of the ranks: a row is the same bits whatever batch it is in. (The
ring that a library's own all-reduce walks starts elsewhere for each part of a buffer, so that a
row's sum would depend on where in the batch it lies. NCCL's is used on GPUs all the same.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch._C._distributed_c10d import (
    GatherOptions,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

from isthmus.common.addresses import listen_on
from isthmus.common.errors import InstanceLostError

LEADER = 0


class TpGroup(Protocol):
    """What the ranks of an instance do together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, E] of every rank, added up: on every rank."""
        ...

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [T, widths[rank]] of every rank, side by side: [T, Σ widths] on every rank."""
        ...

    def join_on_leader(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """As ``join`` on the leader; the others get their own part back."""
        ...

    def meet(self, device: torch.device) -> None:
        """Past this point, in the order of the device's work, every rank has done all before it."""
        ...

    def exchange(self, payload: bytes) -> list[bytes]:
        """The payload of every rank, in their order. For the start, not for steps."""
        ...


class SingleRank:
    """Implements ``TpGroup`` for an instance of one process: everything is whole already."""

    rank = LEADER
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        assert list(widths) == [x.shape[1]], (widths, x.shape)
        return x

    def join_on_leader(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return self.join(x, widths)

    def meet(self, device: torch.device) -> None:
        """Nobody else is there."""

    def exchange(self, payload: bytes) -> list[bytes]:
        return [payload]


class Backend(Protocol):
    """What is used of torch's backends, whose own types leave it out."""

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, /) -> Work: ...
    def allreduce(self, tensors: list[torch.Tensor], /) -> Work: ...
    def gather(
        self,
        outputs: list[list[torch.Tensor]],
        parts: list[torch.Tensor],
        options: GatherOptions,
        /,
    ) -> Work: ...
    def _set_default_timeout(self, timeout: timedelta, /) -> None: ...


class TorchGroup:
    """Implements ``TpGroup`` over one of torch's backends (gloo, NCCL)."""

    def __init__(self, backend: Backend, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._store = store
        self._num_exchanges = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x
        parts = self._gather(x)  # [size, T, E]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def join(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, sum(widths))
        return _side_by_side(self._gather(_widened(x, widths)), widths)

    def join_on_leader(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, sum(widths)) if self.rank == LEADER else x
        part = _widened(x, widths)
        options = GatherOptions()
        options.rootRank = LEADER
        if self.rank != LEADER:
            self._finish(lambda: self._backend.gather([], [part], options))
            return x
        parts = part.new_empty(self.size, *part.shape)
        self._finish(lambda: self._backend.gather([list(parts)], [part], options))
        return _side_by_side(parts, widths)

    def meet(self, device: torch.device) -> None:
        self._gather(torch.zeros(1, 1, device=device))

    def exchange(self, payload: bytes) -> list[bytes]:
        self._num_exchanges += 1
        keys = [f"exchange/{self._num_exchanges}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], payload.hex())
            return [bytes.fromhex(self._store.get(key).decode()) for key in keys]
        except RuntimeError as error:
            raise _lost(error) from error

    def set_timeout(self, timeout_s: float) -> None:
        """Longest wait for another rank from now on."""
        self._backend._set_default_timeout(timedelta(seconds=timeout_s))

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape)
        self._finish(lambda: self._backend._allgather_base(parts.flatten(0, 1), x))
        return parts

    def _finish(self, begin: Callable[[], Work]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise _lost(error) from error


class NcclGroup(TorchGroup):
    """NCCL adds up on the devices; what it gives back is ordered on the current stream."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if len(x):
            self._finish(lambda: self._backend.allreduce([x]))
        return x


def serve_store(host: str, size: int, timeout_s: float) -> TCPStore:
    """Where ranks find each other; listens on ``host`` alone, on a free port (``store.port``)."""
    listener = listen_on(host)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, size: int, timeout_s: float) -> TCPStore:
    """The leader's store. Raises InstanceLostError when nothing answers in time."""
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise _lost(error) from error


def open_group(
    store: Store, rank: int, size: int, *, device: str, host: str, timeout_s: float
) -> TorchGroup:
    """Meets the other ranks: gloo for a CPU, on the interface that has ``host``; NCCL for CUDA.

    ``timeout_s`` is the longest wait for another rank, here and in every operation. Raises
    InstanceLostError when one does not come.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(device)
            return NcclGroup(_nccl(store, rank, size, timeout), store, rank, size)
        return TorchGroup(_gloo(store, rank, size, timeout, host), store, rank, size)
    except RuntimeError as error:
        raise _lost(error) from error


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Backend:
    kind: Any = ProcessGroupGloo  # its types know nothing of these options
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1  # a rank has one operation under way at a time
    return cast("Backend", kind(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Backend:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only builds for CUDA have it

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast("Backend", ProcessGroupNCCL(store, rank, size, options))


def _widened(x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """Ranks send parts of one size: [T, max(widths)]."""
    missing = max(widths) - x.shape[1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _side_by_side(parts: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """parts [size, T, W] → [T, Σ widths]."""
    size, num_rows, widest = parts.shape
    if min(widths) == widest:
        return parts.transpose(0, 1).reshape(num_rows, size * widest)
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


def _lost(error: RuntimeError) -> InstanceLostError:
    # Libraries put a source line before the reason and advice behind it.
    reason = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip() or type(error).__name__)
    first = reason.splitlines()[0].split(". ")[0]
    return InstanceLostError(f"a rank of this instance is lost: {first}", stage="step")
