from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from isthmus.common.clock import VirtualClock
from isthmus.common.config import ClusterConfig
from isthmus.controlplane.actuators.base import ProcessKind, ProcessSpec
from isthmus.controlplane.supervised import (
    HEALTHY_AFTER_S,
    UNLIMITED,
    ProcessState,
    SupervisedProcess,
)
from tests.support.fake_actuator import FakeActuator
from tests.support.poll import poll_until

SPEC = ProcessSpec("decode-0", ProcessKind.DECODE, ClusterConfig(), "127.0.0.1:1")


class Pauses:
    """Stands for ``asyncio.sleep``: remembers the pauses; each takes virtual time only."""

    def __init__(self, clock: VirtualClock) -> None:
        self.seconds: list[float] = []
        self.is_endless = False
        self._clock = clock

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if self.is_endless:
            await asyncio.Event().wait()
        self._clock.advance_ms(1000 * seconds)
        await asyncio.sleep(0)


class Bench:
    def __init__(self, max_restarts: int) -> None:
        self.clock = VirtualClock()
        self.actuator = FakeActuator()
        self.pauses = Pauses(self.clock)
        self.exits: list[tuple[str, ProcessState]] = []
        self.process = SupervisedProcess(
            SPEC,
            self.actuator,
            self.clock,
            max_restarts,
            sleep=self.pauses,
            on_exit=lambda process: self.exits.append((process.last_exit, process.state)),
        )

    async def started(self, count: int) -> None:
        await poll_until(
            lambda: (
                len(self.actuator.handles) == count and self.process.state is ProcessState.RUNNING
            )
        )


@asynccontextmanager
async def running(max_restarts: int = UNLIMITED) -> AsyncIterator[Bench]:
    bench = Bench(max_restarts)
    task = asyncio.create_task(bench.process.run())
    try:
        yield bench
    finally:
        await bench.process.stop(drain_s=1.0)
        await task


@pytest.mark.asyncio
async def test_process_that_ends_is_started_again() -> None:
    async with running() as bench:
        await bench.started(1)
        bench.actuator.handles[0].end("exit code 1: boom")
        await bench.started(2)
        assert bench.process.num_restarts == 1
        assert bench.exits == [("exit code 1: boom", ProcessState.BACKOFF)]
        assert bench.process.pid == bench.actuator.handles[1].pid


@pytest.mark.asyncio
async def test_pauses_grow_and_shrink_again_after_a_long_life() -> None:
    async with running() as bench:
        for count in range(1, 8):
            await bench.started(count)
            bench.actuator.handles[-1].end()
        await bench.started(8)
        assert max(bench.pauses.seconds[:2]) < bench.pauses.seconds[6]
        assert bench.pauses.seconds[6] >= 0.5 * 2**6 * 0.5
        bench.clock.advance_ms(1000 * HEALTHY_AFTER_S + 1)
        bench.actuator.handles[-1].end()
        await bench.started(9)
        assert bench.pauses.seconds[-1] <= 0.5


@pytest.mark.asyncio
async def test_no_restarts_left_means_failed() -> None:
    async with running(max_restarts=1) as bench:
        await bench.started(1)
        bench.actuator.handles[0].end()
        await bench.started(2)
        bench.actuator.handles[1].end()
        await poll_until(lambda: bench.process.state is ProcessState.FAILED)
        assert len(bench.actuator.handles) == 2
        assert bench.exits[-1] == ("exit code 1", ProcessState.FAILED)


@pytest.mark.asyncio
async def test_final_exit_is_not_tried_again() -> None:
    async with running() as bench:
        await bench.started(1)
        bench.actuator.handles[0].end("exit code 2: no such model", is_final=True)
        await poll_until(lambda: bench.process.state is ProcessState.FAILED)
        assert len(bench.actuator.handles) == 1


@pytest.mark.asyncio
async def test_refused_start_is_tried_again() -> None:
    bench = Bench(UNLIMITED)
    bench.actuator.refuse_starts = 2
    task = asyncio.create_task(bench.process.run())
    await bench.started(1)
    assert [reason for reason, _ in bench.exits] == ["no room", "no room"]
    await bench.process.stop(drain_s=1.0)
    await task


@pytest.mark.asyncio
async def test_stop_drains_with_the_time_given() -> None:
    async with running() as bench:
        await bench.started(1)
        await bench.process.stop(drain_s=7.0)
        assert bench.actuator.handles[0].stop_timeout_s == 7.0
        assert not bench.actuator.handles[0].was_killed
        assert bench.process.state is ProcessState.STOPPED
        assert bench.exits == []  # nobody is told of an end that was asked for


@pytest.mark.asyncio
async def test_stop_during_a_pause_does_not_wait_for_it() -> None:
    async with running() as bench:
        await bench.started(1)
        bench.pauses.is_endless = True
        bench.actuator.handles[0].end()
        await poll_until(lambda: bench.process.state is ProcessState.BACKOFF)
        await asyncio.wait_for(bench.process.stop(drain_s=1.0), 5.0)
        assert bench.process.state is ProcessState.STOPPED
        assert bench.process.num_restarts == 0


@pytest.mark.asyncio
async def test_cancelled_supervisor_leaves_no_process() -> None:
    bench = Bench(UNLIMITED)
    task = asyncio.create_task(bench.process.run())
    await bench.started(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.actuator.alive() == []
