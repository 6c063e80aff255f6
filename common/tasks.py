"""Tasks that nobody awaits: what breaks them must be said when it happens, not when they are
collected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from isthmus.common.logging import Logger


def tell_if_broken(log: Logger, event: str) -> Callable[[asyncio.Future[Any]], None]:
    """To be added as a done callback: logs ``event`` with what was raised, as an error. An end by
    cancellation, or without an error, says nothing."""

    def ended(task: asyncio.Future[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(event, exc_info=error)

    return ended


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancels it and waits for its end. What broke it before has been told, and keeps nobody from
    giving back the rest."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
