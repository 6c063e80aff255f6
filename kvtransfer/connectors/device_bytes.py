"""Device memory that somebody else owns, as libraries of Python for CUDA take it."""

from __future__ import annotations

from typing import Any


class DeviceBytes:
    """Told by the interface that such libraries share: numba.readthedocs.io, "CUDA Array
    Interface", version 3."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
