from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from isthmus.common.cluster import InstanceState, LatencyModel, Role
from isthmus.common.errors import DrainingError
from isthmus.common.registry import MemoryRegistry
from isthmus.common.state_machine import IllegalTransitionError
from isthmus.worker.lifecycle import ExitCode, Lifecycle, StopRequest
from isthmus.worker.registration import Registration
from tests.support.router_cluster import make_info

pytestmark = pytest.mark.asyncio


def make_lifecycle() -> Lifecycle:
    info = replace(make_info("d", Role.DECODE), state=InstanceState.STARTING)
    return Lifecycle(Registration(MemoryRegistry(), "c", info, 1000, lambda: None))


async def test_work_is_accepted_only_while_ready() -> None:
    lifecycle = make_lifecycle()
    with pytest.raises(DrainingError):
        lifecycle.check_accepting()
    lifecycle.ready(LatencyModel(prefill_base=9.0))
    lifecycle.check_accepting()
    assert lifecycle.info.latency.prefill_base == 9.0
    assert await lifecycle.drain(lambda: 0, 1000)
    with pytest.raises(DrainingError):
        lifecycle.check_accepting()
    lifecycle.stopped()
    with pytest.raises(IllegalTransitionError):
        lifecycle.ready(LatencyModel())


async def test_a_drain_waits_for_running_work_and_not_for_ever() -> None:
    lifecycle = make_lifecycle()
    lifecycle.ready(LatencyModel())
    running = 1
    drain = asyncio.create_task(lifecycle.drain(lambda: running, 10_000))
    await asyncio.sleep(0)
    assert lifecycle.state is InstanceState.DRAINING
    assert not drain.done()
    running = 0
    assert await drain

    other = make_lifecycle()
    other.ready(LatencyModel())
    assert not await other.drain(lambda: 1, 20)


async def test_listeners_hear_of_every_state() -> None:
    lifecycle = make_lifecycle()
    states: list[InstanceState] = []
    lifecycle.subscribe(states.append)
    lifecycle.ready(LatencyModel())
    await lifecycle.drain(lambda: 0, 10)
    lifecycle.stopped()
    assert states == [InstanceState.READY, InstanceState.DRAINING, InstanceState.STOPPED]


async def test_the_first_reason_to_stop_wins() -> None:
    stop = StopRequest()
    stop.fail("engine")
    stop.drain("SIGTERM")
    await stop.wait()
    assert (stop.exit_code, stop.reason, stop.drain_ms) == (ExitCode.FAULT, "engine", 0)
