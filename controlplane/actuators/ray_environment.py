"""What a private Ray finds in its environment.

Apart from ``actuators.ray`` because it has to be set before Ray is imported: Ray's native half
reads it while it is loaded.
"""

from __future__ import annotations

import os
import secrets

from isthmus.controlplane.actuators.base import process_environment


def private_environment() -> dict[str, str]:
    """Ray's processes inherit it, so all of them agree."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Other users of this machine reach its ports too: a token that only this cluster knows.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray's name for "only this machine": it then listens on the loopback interface alone.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def prepare_environment(address: str) -> None:
    """For a private Ray sets the above; a Ray that is joined has settings of its own."""
    if not address:
        os.environ.update(process_environment(1) | private_environment())
