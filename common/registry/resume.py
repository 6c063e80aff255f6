"""A watch that outlives the registry: the last view is kept, and what changed meanwhile is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from isthmus.common.backoff import Backoff
from isthmus.common.errors import IsthmusError
from isthmus.common.registry.base import Registry, WatchEvent


def _ignore(_: bool) -> None:
    pass


async def resume_watch(
    registry: Registry,
    prefix: str,
    *,
    on_connected: Callable[[bool], None] = _ignore,
    backoff: Backoff | None = None,
) -> AsyncGenerator[WatchEvent, None]:
    """Events under ``prefix`` for ever; close the generator to stop.

    While the registry is away nothing is yielded, so the caller keeps its last view. When it is
    back, keys that went in between are yielded as deleted, changed and new ones with their entry,
    unchanged ones not again. ``on_connected`` hears True when a listing is complete and False when
    the watch breaks. Waits between tries are jittered, so that no two clients come back together.
    """
    backoff, loop = backoff or Backoff(), asyncio.get_running_loop()
    known: dict[str, bytes] = {}
    while True:
        try:
            listing = await registry.list_and_watch(prefix)
        except IsthmusError:
            on_connected(False)
            await asyncio.sleep(backoff.next_s())
            continue
        began_s = loop.time()
        try:
            present = {entry.key for entry in listing.entries}
            for key in sorted(known.keys() - present):
                del known[key]
                yield WatchEvent(key, None, 0)
            for entry in listing.entries:
                if known.get(entry.key) != entry.value:
                    known[entry.key] = entry.value
                    yield WatchEvent(entry.key, entry, entry.revision)
            on_connected(True)
            async for event in listing.changes:
                if event.entry is None:
                    known.pop(event.key, None)
                else:
                    known[event.key] = event.entry.value
                yield event
        except IsthmusError:
            on_connected(False)
            backoff.lasted(loop.time() - began_s)
            await asyncio.sleep(backoff.next_s())
        finally:
            await listing.changes.aclose()
