"""Chooses the implementation of the kernels for a device; the caller holds on to what it gets."""

from __future__ import annotations

import functools
from typing import Literal

from isthmus.common.logging import get_logger
from isthmus.kernels import reference
from isthmus.kernels.cpu import BuildError, CpuKernels
from isthmus.kernels.types import Kernels

Implementation = Literal["auto", "cpu", "reference"]

_log = get_logger("kernels")


@functools.cache
def select(
    device: str = "cpu", num_threads: int = 1, implementation: Implementation = "auto"
) -> Kernels:
    """The kernels for ``device`` (``cpu``, ``cuda``, ``cuda:1``); made once for equal arguments.

    ``auto`` takes the fastest that works here: on the CPU the compiled ones, or the reference where
    they cannot be compiled. Raises BuildError when they were asked for by name and cannot be.
    """
    on_cpu = device.partition(":")[0] == "cpu"
    if implementation == "cpu":
        return CpuKernels(num_threads)
    if implementation == "auto" and on_cpu:
        try:
            return CpuKernels(num_threads)
        except BuildError as error:
            _log.warning("no compiled CPU kernels; falling back to torch", reason=str(error))
    return reference


def describe(device: str = "cpu") -> str:
    """One line for an operator: what ``select`` chooses for the device."""
    return select(device).describe()
