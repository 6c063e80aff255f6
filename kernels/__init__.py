"""The operations of a forward pass, each a pure function with one signature for all devices.

``select(device, num_threads)`` returns the fastest implementation that works here.
"""

from isthmus.kernels.registry import describe, select
from isthmus.kernels.types import Kernels, PackedLinear

__all__ = ["Kernels", "PackedLinear", "describe", "select"]
