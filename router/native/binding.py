"""The C interface of the compiled library. Addresses are plain numbers: whoever calls keeps what
lies there alive, and has checked nothing that the columns do not say of themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from isthmus.common import native
from isthmus.common.native import BuildError, bind_function

# Results must be those of numpy: no operation may be fused with another or done in another order.
SOURCES = native.Sources(
    "router",
    Path(__file__).parent,
    ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


@dataclass(frozen=True, slots=True)
class Library:
    weigh: Callable[[int, int, int], None]
    workspace_size: Callable[[int, int], int]


def load_library(cache_dir: Path | None = None) -> Library:
    """Compiles it where that has not been done (seconds). Raises BuildError."""
    path = native.build_library(SOURCES, cache_dir)
    try:
        # A call takes microseconds: handing the interpreter over meanwhile costs more.
        bind = partial(bind_function, ctypes.PyDLL(str(path)))
        return Library(
            weigh=bind("weigh", c_void_p, c_void_p, c_void_p),
            workspace_size=bind("workspace_size", c_int64, c_int64, result=c_int64),
        )
    except (OSError, AttributeError) as error:
        raise BuildError(f"cannot load {path}: {error}") from error
