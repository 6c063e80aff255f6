"""Ending a cluster from another process: ask, wait, and end by force only what does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

from isthmus.common.errors import IsthmusError
from isthmus.controlplane.client import shut_down
from isthmus.controlplane.state_file import ClusterState, is_running

_PERIOD_S = 0.05


def end_cluster(state: ClusterState, timeout_s: float) -> bool:
    """Returns when the control process is gone; True when it left in order.

    A control process that is killed takes its children with it.
    """
    try:
        asyncio.run(shut_down(state.control_address, "isthmus down"))
    except IsthmusError:
        _send(state.pid, signal.SIGTERM)
    if _wait_gone(state, timeout_s):
        return True
    _send(state.pid, signal.SIGKILL)
    _wait_gone(state, 5.0)
    return False


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_gone(state: ClusterState, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_running(state):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PERIOD_S)
    return True
