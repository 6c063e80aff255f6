"""ucxx as it is used here; whoever imports this has chosen its UCX for the process."""

from __future__ import annotations

import os

from isthmus.common.errors import TransferError
from isthmus.kvtransfer.connectors.ucx_process import claim

claim("ucx")
# What ucxx sets as well, after its UCX has read the environment. Without it memory that was host
# memory once may be taken for it when it has become a device's: UCX's wiki, "NVIDIA GPU Support".
os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")
# Instead of 8 KiB: 1 MiB over the loopback device took half the time, 16 MiB a third.
for _direction in ("TX", "RX"):
    os.environ.setdefault(f"UCX_TCP_{_direction}_SEG_SIZE", "256k")
try:
    import ucxx  # noqa: F401 - finds the wheel's library and sets UCX up
    from ucxx._lib.arr import Array
    from ucxx._lib.libucxx import Feature, UCXContext, UCXError, UCXListener, UCXWorker, UCXXTag
except ImportError as missing:
    raise TransferError(
        "the ucx connector needs the wheel ucxx-cu12: pip install 'isthmus[ucx]'",
        stage="register",
    ) from missing

__all__ = [
    "Array",
    "Feature",
    "UCXContext",
    "UCXError",
    "UCXListener",
    "UCXWorker",
    "UCXXTag",
]
