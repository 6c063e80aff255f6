"""Names of this machine that differ where two processes cannot share memory."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = ("net", "user")  # of abstract sockets; of what a user number means


def host_id() -> str:
    """Of this start of this machine: containers of one kernel share it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{uuid.getnode():012x}"


def sharing_domain() -> str:
    """Two processes of one such domain can pass each other files over an abstract socket."""
    return ":".join((host_id(), f"uid {os.getuid()}", *map(_namespace, _NAMESPACES)))


def process_domain() -> str:
    return f"{host_id()}:pid {os.getpid()}"


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())  # such as net:[4026531840]
    except OSError:
        return f"{kind}:?"
