"""Compiles the C++ sources beside this file, once a machine (``common.native``)."""

from __future__ import annotations

from pathlib import Path

from isthmus.common import native
from isthmus.common.native import BuildError

SOURCES = native.Sources("kernels", Path(__file__).parent)

__all__ = ["BuildError", "build_library"]


def build_library(cache_dir: Path | None = None) -> Path:
    """Raises BuildError."""
    return native.build_library(SOURCES, cache_dir)
