"""Ways to move bytes between two pools, each as a writer and a target.

::

    memcpy          one process, C's memmove: the machine's limit
    raw nixl        NIXL's own calls, with descriptors that were prepared before
    raw nixl, tcp   the same with UCX_TLS=tcp
    anything else   the connector of that name; ", tcp" as above
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from isthmus.common.config import ConnectorName, TransferConfig
from isthmus.common.errors import TransferError
from isthmus.common.ids import InstanceId
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.connectors.copying import copy_rows
from isthmus.kvtransfer.connectors.registry import create_connectors
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.interface import MemoryRegion, PeerName, WriteState

MEMCPY = "memcpy"
RAW_NIXL = "raw nixl"
_NOTE = b"n" * 40  # as long as a notification is
Introduction = tuple[bytes, MemoryRegion]


class Way(Protocol):
    def introduce(self) -> Introduction: ...

    def meet(self, introduction: Introduction) -> None: ...

    def prepare(self, plan: Copies) -> Callable[[], None]:
        """A function that makes these copies and returns when they are there: what is timed."""
        ...

    def serve(self) -> None:
        """The target's part while others write; called all the time."""
        ...

    def close(self) -> None: ...


def split_name(way: str) -> tuple[str, str]:
    """(name, UCX_TLS) of a way."""
    name, _, tls = way.partition(", ")
    return name, tls


def make_way(name: str, agent: str, region: MemoryRegion, piece_bytes: int) -> Way:
    """Raises TransferError when it cannot be had here."""
    if name == MEMCPY:
        return Memcpy(region)
    if name == RAW_NIXL:
        return RawNixl(agent, region, piece_bytes)
    return OverConnector(name, agent, region, piece_bytes)  # type: ignore[arg-type]


class Memcpy:
    """Within the writer's process, whose second half of the pool is the target."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    def introduce(self) -> Introduction:
        return b"", self._region

    def meet(self, introduction: Introduction) -> None:
        pass

    def prepare(self, plan: Copies) -> Callable[[], None]:
        half = self._region.num_bytes // 2
        base = self._region.base_address
        return lambda: copy_rows(plan.rows, base, base + half)

    def serve(self) -> None:
        pass

    def close(self) -> None:
        pass


class OverConnector:
    def __init__(
        self, name: ConnectorName, agent: str, region: MemoryRegion, piece_bytes: int
    ) -> None:
        config = TransferConfig(connector=name)
        me = InstanceRef(InstanceId(agent), 1, "127.0.0.1:0")
        (self._connector,) = create_connectors(config, me, region, piece_bytes)
        self._connector.register(region)
        self._region = region
        self._peer: PeerName | None = None

    def introduce(self) -> Introduction:
        return self._connector.metadata(), self._region

    def meet(self, introduction: Introduction) -> None:
        self._peer = self._connector.add_peer(*introduction)

    def prepare(self, plan: Copies) -> Callable[[], None]:
        peer, connector = self._peer, self._connector
        assert peer is not None

        def write() -> None:
            handle = connector.post_write(peer, plan, _NOTE)
            while (state := connector.poll(handle)) is WriteState.IN_PROGRESS:
                pass
            connector.release(handle)
            if state is not WriteState.DONE:
                raise TransferError(f"a write over {connector.name} failed", stage="bench")

        return write

    def serve(self) -> None:
        self._connector.take_notifications()

    def close(self) -> None:
        self._connector.close()


class RawNixl:
    """As its documentation has it: memory registered and descriptors of all pieces prepared once, a
    write names pieces by number, is started, asked about until it is done, and released."""

    def __init__(self, agent: str, region: MemoryRegion, piece_bytes: int) -> None:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        import isthmus.kvtransfer.connectors.nixl  # noqa: F401 - sets UCX up

        self._agent: Any = nixl_agent(agent, nixl_agent_config(enable_prog_thread=False))
        self._region = region
        self._piece_bytes = piece_bytes
        descriptor = (region.base_address, region.num_bytes, 0, "")
        self._registered = self._agent.register_memory([descriptor], "DRAM")
        self._mine = self._pieces("NIXL_INIT_AGENT", region)
        self._theirs: Any = None

    def introduce(self) -> Introduction:
        return self._agent.get_agent_metadata(), self._region

    def meet(self, introduction: Introduction) -> None:
        metadata, region = introduction
        self._theirs = self._pieces(self._agent.add_remote_agent(metadata), region)

    def prepare(self, plan: Copies) -> Callable[[], None]:
        agent, mine, theirs = self._agent, self._mine, self._theirs
        sources, targets = (
            (plan.rows[:, column] // self._piece_bytes).astype(np.int32) for column in (0, 1)
        )

        def write() -> None:
            transfer = agent.make_prepped_xfer("WRITE", mine, sources, theirs, targets, _NOTE)
            state = agent.transfer(transfer)
            while state == "PROC":
                state = agent.check_xfer_state(transfer)
            transfer.release()
            if state != "DONE":
                raise TransferError("a raw write failed", stage="bench")

        return write

    def serve(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        self._mine.release()
        if self._theirs is not None:
            self._theirs.release()
        self._agent.deregister_memory(self._registered)
        del self._agent

    def _pieces(self, agent: Any, region: MemoryRegion) -> Any:
        count = region.num_bytes // self._piece_bytes
        rows: npt.NDArray[np.uint64] = np.empty((count, 3), dtype=np.uint64)
        rows[:, 0] = region.base_address + np.arange(count) * self._piece_bytes
        rows[:, 1] = self._piece_bytes
        rows[:, 2] = 0
        return self._agent.prep_xfer_dlist(agent, rows, "DRAM")
