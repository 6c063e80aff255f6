"""Blocking work beside the event loop, on daemon threads: none may delay the process's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def run_in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Like ``asyncio.to_thread``, with a thread of its own that nobody waits for at exit."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[ResultT] = loop.create_future()

    def finish(value: ResultT | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as caught:  # noqa: BLE001 — handed to the waiter, whatever it is
            error = caught
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(finish, value, error)

    threading.Thread(target=run, name="blocking", daemon=True).start()
    return await result
