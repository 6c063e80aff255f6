"""The C interface of the compiled library. Addresses are plain numbers: whoever calls keeps what
lies there alive, and has checked nothing that the columns do not say of themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from isthmus.common import native
from isthmus.common.logging import get_logger
from isthmus.common.native import BuildError, bind_function

# Results must be those of numpy: no operation may be fused with another or done in another order.
SOURCES = native.Sources(
    "router",
    Path(__file__).parent,
    ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)

_log = get_logger("router")


@dataclass(frozen=True, slots=True)
class Library:
    weigh: Callable[[int, int, int], None]
    num_places: Callable[[int, int], int]
    workspace_size: Callable[[int, int], int]
    blocks_make: Callable[[int], int]
    blocks_free: Callable[[int], None]
    blocks_size: Callable[[int], int]
    blocks_width: Callable[[int], int]
    blocks_bytes: Callable[[int], int]
    blocks_held_by: Callable[[int, int], int]
    blocks_store: Callable[[int, int, bytes, int], None]
    blocks_remove: Callable[[int, int, bytes, int], None]
    blocks_clear: Callable[[int, int], None]
    blocks_evict: Callable[[int, int], None]
    blocks_depths: Callable[[int, bytes, int, bool, int], None]
    blocks_list: Callable[[int, int, int], None]


def load_library(cache_dir: Path | None = None) -> Library:
    """Compiles it where that has not been done (seconds). Raises BuildError."""
    path = native.build_library(SOURCES, cache_dir)
    try:
        # A call takes microseconds: handing the interpreter over meanwhile costs more.
        bind = partial(bind_function, ctypes.PyDLL(str(path)))
        return Library(
            weigh=bind("weigh", c_void_p, c_void_p, c_void_p),
            num_places=bind("num_places", c_void_p, c_void_p, result=c_int64),
            workspace_size=bind("workspace_size", c_int64, c_int64, result=c_int64),
            blocks_make=bind("blocks_make", c_uint64, result=c_void_p),
            blocks_free=bind("blocks_free", c_void_p),
            blocks_size=bind("blocks_size", c_void_p, result=c_int64),
            blocks_width=bind("blocks_width", c_void_p, result=c_int64),
            blocks_bytes=bind("blocks_bytes", c_void_p, result=c_int64),
            blocks_held_by=bind("blocks_held_by", c_void_p, c_int64, result=c_int64),
            blocks_store=bind("blocks_store", c_void_p, c_int64, c_char_p, c_int64),
            blocks_remove=bind("blocks_remove", c_void_p, c_int64, c_char_p, c_int64),
            blocks_clear=bind("blocks_clear", c_void_p, c_int64),
            blocks_evict=bind("blocks_evict", c_void_p, c_int64),
            blocks_depths=bind("blocks_depths", c_void_p, c_char_p, c_int64, c_int64, c_void_p),
            blocks_list=bind("blocks_list", c_void_p, c_void_p, c_void_p),
        )
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {path}: {error}") from error


@cache
def compiled_library() -> Library | None:
    """One for the process; None where it cannot be compiled."""
    try:
        return load_library()
    except BuildError as error:
        _log.warning("no compiled policy and index, Python does it", why=str(error))
        return None


def prepare() -> None:
    """Compiles it unless it is in the cache: seconds, so not in a loop that has to answer."""
    compiled_library()
