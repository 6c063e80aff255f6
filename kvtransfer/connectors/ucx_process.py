"""UCX as ``nixl`` and ``ucx`` find it: which devices it has here, and that a process has one of it.

The wheels of both bring a UCX of their own. Two of them in one process would share symbols and
state without knowing of each other, so whichever is loaded first keeps the process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from isthmus.common.errors import TransferError

HAS_RDMA = any(Path("/sys/class/infiniband").glob("*"))
_RDMA_TRANSPORTS = frozenset(
    {"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"}
)
_MODULES = {"nixl": "nixl_cu13", "ucx": "ucxx"}


def claim(connector: str) -> None:
    """Before the connector's library is loaded, whose UCX reads its settings from the environment.

    Raises TransferError when another UCX is in this process already.
    """
    for other, module in _MODULES.items():
        if other != connector and module in sys.modules:
            raise TransferError(
                f"{connector} and {other} cannot share a process, since each brings a UCX of its "
                f"own, and {module} is loaded already",
                stage="register",
            )
    if not HAS_RDMA:
        # UCX's InfiniBand module crashes at interpreter exit on machines without such a device.
        os.environ.setdefault("UCX_MODULES", "^ib")


def may_use_rdma() -> bool:
    """There is a device, and UCX_TLS is not against it: a list of transports, or with ``^`` of
    those that are left out."""
    chosen = os.environ.get("UCX_TLS", "all")
    names = set(chosen.removeprefix("^").split(","))
    return HAS_RDMA and bool(names & _RDMA_TRANSPORTS) is not chosen.startswith("^")
