"""The kernels of a CPU: a C++ library with a plain C interface, compiled on first use."""

from isthmus.kernels.cpu.build import BuildError
from isthmus.kernels.cpu.ops import CpuKernels

__all__ = ["BuildError", "CpuKernels"]
