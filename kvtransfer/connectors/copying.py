"""Copies within what this process can address, as fast as its memory."""

from __future__ import annotations

import ctypes

from isthmus.kvtransfer.copies import Rows

# Below it a piece is copied in less time than it takes to get the interpreter's lock back while
# another thread computes, so it is kept; above it other threads run meanwhile.
_KEEP_LOCK_BYTES = 64 * 2**10

_letting_others_run = ctypes.CDLL(None).memmove
_keeping_lock = ctypes.PyDLL(None).memmove
for _function in (_letting_others_run, _keeping_lock):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None


def copy_rows(rows: Rows, source_base: int, target_base: int) -> None:
    """``rows`` are those of ``Copies``, whose bounds have been checked."""
    for source, target, num_bytes in rows.tolist():
        copy = _keeping_lock if num_bytes < _KEEP_LOCK_BYTES else _letting_others_run
        copy(target_base + target, source_base + source, num_bytes)
