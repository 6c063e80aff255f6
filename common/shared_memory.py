"""Memory that processes of one host can hand each other: files without a name."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def create_shared_memory(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Zeroed memory and the descriptor of its file, which is the caller's to close; the mapping
    stays. Whoever is given the descriptor can map the same memory.

    Nothing is left of the file once nobody maps it or holds a descriptor. It can neither shrink nor
    grow, so that every mapping of it can always be read. Linux only; raises OSError.
    """
    fd = os.memfd_create("isthmus-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return map_shared_memory(fd, num_bytes), fd
    except BaseException:
        os.close(fd)
        raise


def map_shared_memory(fd: int, num_bytes: int) -> mmap.mmap:
    """The beginning of a memory file, in huge pages where the system has them. Raises OSError."""
    mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def cannot_shrink(fd: int) -> bool:
    """False for what is not a memory file, too."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def has_huge_shared_pages() -> bool:
    """True where the system gives shared memory huge pages when it is asked to."""
    try:
        setting = _SHMEM_ENABLED.read_text()
    except OSError:
        return False
    return any(f"[{value}]" in setting for value in ("always", "within_size", "advise", "force"))
