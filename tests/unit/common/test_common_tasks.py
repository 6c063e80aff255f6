"""Tasks that nobody awaits."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from isthmus.common.logging import get_logger
from isthmus.common.tasks import end_task, tell_if_broken


async def _end(error: Exception | None) -> None:
    if error is not None:
        raise error


@pytest.mark.asyncio
async def test_only_what_breaks_a_task_is_said() -> None:
    with capture_logs() as logs:
        tasks = [asyncio.create_task(_end(error)) for error in (None, ValueError("why"))]
        tasks.append(asyncio.create_task(asyncio.sleep(3600)))
        for number, task in enumerate(tasks):
            task.add_done_callback(tell_if_broken(get_logger("test"), f"task {number} broke"))
        tasks[2].cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)  # callbacks come after the end
    (entry,) = logs
    assert entry["event"] == "task 1 broke"
    assert str(entry["exc_info"]) == "why"


@pytest.mark.asyncio
async def test_a_task_is_ended_whatever_it_ended_with_before() -> None:
    broken = asyncio.create_task(_end(ValueError("why")))
    running = asyncio.create_task(asyncio.sleep(3600))
    await asyncio.wait([broken])
    for task in (broken, running, None):
        await end_task(task)
    assert running.cancelled()
