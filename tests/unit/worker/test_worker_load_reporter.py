from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.cluster import LinkRate, LoadReport
from isthmus.common.ids import InstanceId
from isthmus.common.types import InstanceRef
from isthmus.worker.load_reporter import LoadReporter, OutsideLoad
from tests.support.engine_driver import make_prompt, make_request
from tests.support.poll import poll_until
from tests.support.tiny_model import make_tiny_core

ME = InstanceRef(InstanceId("d"), 4, "127.0.0.1:1")


def test_a_report_adds_what_the_engine_does_not_know() -> None:
    core = make_tiny_core()
    core.add(make_request("r", make_prompt(10)))
    links = (LinkRate(InstanceId("e"), 2e9),)
    outside = OutsideLoad(2, 30, inflight_transfer_bytes=99, links=links, prompt_seqs=1)
    reporter = LoadReporter(core, ME, VirtualClock(7), lambda: outside)
    first, second = reporter.report(), reporter.report()
    assert (first.waiting_seqs, first.waiting_tokens) == (3, 40)
    assert first.prompt_seqs == 2
    assert first.inflight_transfer_bytes == 99
    assert first.links == links
    assert (first.instance_id, first.epoch, first.at_ns) == ("d", 4, 7)
    assert second.seq == first.seq + 1


@asynccontextmanager
async def following(reporter: LoadReporter) -> AsyncIterator[list[LoadReport]]:
    """What the reporter says, from its first report on."""
    seen: list[LoadReport] = []

    async def follow() -> None:
        async for report in reporter.follow(10):
            seen.append(report)  # noqa: PERF401 (it never ends)

    reader = asyncio.create_task(follow())
    await poll_until(lambda: len(seen) == 1)
    yield seen
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)


@pytest.mark.asyncio
async def test_an_idle_instance_reports_rarely() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with following(LoadReporter(make_tiny_core(), ME, VirtualClock(7), OutsideLoad)) as seen:
        await poll_until(lambda: len(seen) == 2)
        assert loop.time() - began > 0.5  # the heartbeat


@pytest.mark.asyncio
async def test_a_change_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.worker.load_reporter._HEARTBEAT_S", 600.0)
    reporter = LoadReporter(make_tiny_core(), ME, VirtualClock(7), OutsideLoad)
    async with following(reporter) as seen:
        reporter.changed()
        await poll_until(lambda: len(seen) == 2)
