"""Who starts the followers of an instance: its leader, as children, unless Ray places them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Protocol

import msgspec

from isthmus.common.errors import InternalError
from isthmus.worker.rank_link import Invitation

INVITATION_VARIABLE = "ISTHMUS_PROCESS_INVITATION"
_GONE_TIMEOUT_S = 3.0


def device_of(first: str, rank: int) -> str:
    """A rank's own device where all ranks see the same ones; ``first`` is the leader's."""
    kind, _, index = first.partition(":")
    return first if kind == "cpu" else f"{kind}:{int(index or 0) + rank}"


class RankLauncher(Protocol):
    """Starts followers and sees to it that none is left."""

    def launch(self, invitation: Invitation) -> None:
        """Returns at once. Call it in a thread that lives as long as the process: where followers
        are children, they end with the thread that started them."""
        ...

    def problem(self) -> str:
        """Which follower has ended and how; empty while all live as far as can be told."""
        ...

    def close(self) -> None:
        """Ends the followers that have not ended by themselves. Idempotent."""
        ...


class ChildLauncher:
    """Implements ``RankLauncher``: followers inherit the leader's environment, log and session."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def launch(self, invitation: Invitation) -> None:
        device = device_of(invitation.device, invitation.rank)
        invitation = msgspec.structs.replace(invitation, device=device)
        environment = {INVITATION_VARIABLE: msgspec.json.encode(invitation).decode()}
        try:
            self._children[invitation.rank] = subprocess.Popen(
                [sys.executable, "-m", "isthmus.worker.rank"],
                stdin=subprocess.DEVNULL,
                env=os.environ | environment,
            )
        except OSError as error:
            message = f"cannot start rank {invitation.rank}: {error.strerror}"
            raise InternalError(message, stage="start") from error

    def problem(self) -> str:
        for rank, child in self._children.items():
            code = child.poll()
            if code is not None:
                return f"rank {rank} ended with {code}"
        return ""

    def close(self) -> None:
        deadline = time.monotonic() + _GONE_TIMEOUT_S  # of all together
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()
