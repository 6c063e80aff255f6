"""What every decision and KV event runs through, compiled: the goodput policy's arithmetic over the
columns of a ``PairTable``, and the blocks of the prefix index.

C++ with a plain C interface, compiled on first use. Each header is named after the module that says
the same in Python; a change of one is a change of the other.
"""

from isthmus.router.native.binding import prepare
from isthmus.router.native.compiled_blocks import CompiledBlocks
from isthmus.router.native.weigher import Weigher

__all__ = ["CompiledBlocks", "Weigher", "prepare"]
