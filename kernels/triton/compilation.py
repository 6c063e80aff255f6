"""In which forms the kernels are launched: the declared list that is compiled ahead of time.

A module of kernels exports ``COMPILE_CASES``. A case fixes what a launcher would fix: the types of
the run-time arguments and the values of the compile-time ones. Nothing here imports Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

SM_80, SM_90, SM_100 = 80, 90, 100
TARGETS = (SM_80, SM_90, SM_100)
"""Compute capabilities: A100, H100 and H200, B200."""

Constant = int | float | bool | str | None


class JitKernel(Protocol):
    """What ``triton.jit`` makes of a function."""

    __name__: str
    arg_names: list[str]


@dataclass(frozen=True, slots=True)
class CompileCase:
    """One specialisation of a kernel.

    ``types`` gives each run-time argument as Triton writes it (``*bf16``, ``i32``, ``fp32``);
    ``constants`` the rest, an absent pointer being None. Pointers are taken to be aligned to 16
    bytes, as torch's allocations are; ``aligned`` names the integers that are multiples of 16.
    """

    label: str
    kernel: JitKernel
    types: Mapping[str, str]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 3
    has_fp_fusion: bool = True
    targets: tuple[int, ...] = TARGETS
    max_spill_bytes: int = 0
    """Most bytes that a thread may store to local memory for want of registers."""
