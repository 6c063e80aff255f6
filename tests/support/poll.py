"""Waiting for a condition with a deadline: what tests do instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def poll_until(
    condition: Callable[[], bool], timeout_s: float = 30.0, period_s: float = 0.005
) -> None:
    """Returns when ``condition()`` holds; raises TimeoutError when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"condition did not hold within {timeout_s} s")
        await asyncio.sleep(period_s)
