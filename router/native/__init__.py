"""The goodput policy's arithmetic compiled: the same numbers as numpy's, in one call.

C++ with a plain C interface over the columns of a ``PairTable``, compiled on first use. Each file
is named after the module that says the same in numpy; a change of one is a change of the other.
"""

from isthmus.router.native.weigher import Weigher, prepare

__all__ = ["Weigher", "prepare"]
