from __future__ import annotations

import threading

import pytest

from isthmus.common.clock import SystemClock, VirtualClock
from isthmus.engine.core import EngineCore
from isthmus.engine.types import StepOutput
from isthmus.worker.engine_loop import EngineLoop
from tests.support.engine_driver import make_prompt, make_request
from tests.support.poll import poll_until
from tests.support.tiny_model import TinyModel, make_tiny_core

pytestmark = pytest.mark.asyncio


class Ears:
    def __init__(self) -> None:
        self.steps: list[StepOutput] = []
        self.errors: list[BaseException] = []
        self.threads: set[int] = set()

    def on_step(self, output: StepOutput) -> None:
        self.steps.append(output)
        self.threads.add(threading.get_ident())


def make_loop(core: EngineCore) -> tuple[EngineLoop, Ears]:
    ears = Ears()
    return EngineLoop(core, SystemClock(), ears.on_step, ears.errors.append), ears


async def test_steps_run_beside_the_event_loop_and_arrive_on_it_in_order() -> None:
    core = make_tiny_core(clock=SystemClock())
    loop, ears = make_loop(core)
    loop.start()
    core.add(make_request("r", make_prompt(10), max_tokens=5))
    await poll_until(lambda: len(ears.steps) == 5)
    assert await loop.stop()
    assert [len(step.updates) for step in ears.steps] == [1] * 5
    assert [step.step_id for step in ears.steps] == sorted(step.step_id for step in ears.steps)
    assert ears.threads == {threading.get_ident()}
    core.check_integrity()


async def test_a_failing_engine_is_told_once_and_ends_the_thread() -> None:
    model = TinyModel()
    core = make_tiny_core(model, clock=SystemClock())
    loop, ears = make_loop(core)
    loop.start()
    model.fail_next = 1000
    for index in range(6):
        core.add(make_request(f"r{index}", make_prompt(4), max_tokens=5))
        await poll_until(lambda index=index: bool(ears.errors) or len(ears.steps) > index)
    await poll_until(lambda: bool(ears.errors))
    assert await loop.stop()
    assert len(ears.errors) == 1


async def test_an_idle_engine_progresses_and_work_without_steps_does_not() -> None:
    clock = VirtualClock(10**18)
    core = make_tiny_core(clock=clock)
    loop = EngineLoop(core, clock, lambda _: None, lambda _: None)  # its thread never starts
    clock.advance_ms(60_000)
    assert loop.is_progressing()
    core.add(make_request("r", make_prompt(10)))
    assert loop.is_progressing()
    clock.advance_ms(loop.stall_after_ms + 1)
    assert not loop.is_progressing()
    assert not loop.is_hung()  # no step is under way: somebody else holds the blocks


async def test_a_step_that_does_not_return_is_hung() -> None:
    clock = VirtualClock(10**18)
    model = TinyModel()
    gate = threading.Event()
    model.before_forward = lambda: bool(gate.wait(20)) and None
    core = make_tiny_core(model, clock=clock)
    ears = Ears()
    loop = EngineLoop(core, clock, ears.on_step, ears.errors.append)
    core.add(make_request("r", make_prompt(10), max_tokens=1))
    loop.start()
    await poll_until(lambda: model.before_forward is None)
    assert not loop.is_hung()
    clock.advance_ms(10 * loop.stall_after_ms)
    assert loop.is_hung()
    gate.set()
    await poll_until(lambda: len(ears.steps) == 1)
    assert await loop.stop()
