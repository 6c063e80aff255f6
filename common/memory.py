"""How much memory new allocations can have."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes: the machine's, or less where a container has a limit (cgroup v2)."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return available
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (cgroup / "memory.stat").read_text(encoding="ascii").split()
        reclaimable = int(stat[stat.index("inactive_file") + 1])
    except (OSError, ValueError):  # no container, or a kernel that tells less
        return available
    return max(min(available, int(limit) - used + reclaimable), 0)
