"""Sends every call when it is due, whatever has become of the earlier ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from isthmus.loadgen.client import Endpoint, stopwatch
from isthmus.loadgen.prompts import PromptMaker
from isthmus.loadgen.types import Record
from isthmus.workload import Call

Progress = Callable[[int, int], None]


def _silent(_sent: int, _ended: int) -> None:
    """Progress that nobody looks at."""


async def run_calls(
    endpoint: Endpoint,
    calls: Sequence[Call],
    prompts: PromptMaker,
    *,
    on_progress: Progress = _silent,
) -> list[Record]:
    """A record for each call, in their order; returns when all have ended.

    Calls must be sorted by ``due_s``. ``on_progress`` hears how many were sent and how many have
    ended."""
    records = [Record(call) for call in calls]
    num_sent = num_ended = 0
    now_s = stopwatch()

    async def follow(record: Record, prompt: list[int] | str) -> None:
        nonlocal num_ended
        await endpoint.follow(record, prompt, now_s)
        num_ended += 1
        on_progress(num_sent, num_ended)

    async with asyncio.TaskGroup() as running:
        for record in records:
            prompt = prompts.prompt(record.call)  # in the time until it is due
            await asyncio.sleep(max(0.0, record.call.due_s - now_s()))
            running.create_task(follow(record, prompt))
            num_sent += 1
            on_progress(num_sent, num_ended)
    return records
