"""What a step tells of its layers while it runs, and that it never tells more than it has done."""

from __future__ import annotations

import ctypes

import pytest

from isthmus.common.ids import RequestId
from isthmus.common.layer_progress import LayerCounter
from isthmus.engine.core import EngineCore
from isthmus.engine.device import DeviceEvent, HostDevice
from isthmus.engine.layer_events import LayerEvents
from isthmus.engine.types import SequenceMode, StepLaunch
from tests.support.device_core import make_device_core
from tests.support.engine_driver import Driver, make_prompt, make_request
from tests.support.tiny_model import TinyModel, make_tiny_core

NUM_LAYERS = 2
A, B = RequestId("a"), RequestId("b")


class Watch:
    """An engine whose launches are kept, with what each told after every layer of its own pass."""

    def __init__(self, core: EngineCore, model: TinyModel) -> None:
        self.launches: list[StepLaunch] = []
        self.told: list[int] = []
        core.watch_launches(self.launches.append)
        model.after_layer = self._after_layer
        self.core = core
        self.model = model

    def _after_layer(self, layer: int) -> None:
        if self.launches:
            self.told.append(self.launches[-1].progress.num_final_layers)

    @property
    def num_final(self) -> list[int]:
        return [launch.progress.num_final_layers for launch in self.launches]


def watched(**engine: object) -> Watch:
    model = TinyModel()
    return Watch(make_tiny_core(model, max_num_batched_tokens=8, **engine), model)


def test_each_layer_is_told_as_it_becomes_final() -> None:
    watch = watched()
    watch.core.add(make_request(A, make_prompt(20)), SequenceMode.PREFILL_ONLY)
    Driver(watch.core).run()
    assert [dict(launch.num_tokens) for launch in watch.launches] == [{A: 8}, {A: 16}, {A: 20}]
    assert watch.told == [1, 2] * 3
    assert watch.num_final == [2, 2, 2]
    assert [launch.step_id for launch in watch.launches] == [0, 1, 2]
    watch.core.release_hold(A)


def test_only_sequences_that_a_peer_waits_for_are_told_of() -> None:
    watch = watched()
    watch.core.add(make_request(A, make_prompt(6)))
    watch.core.add(make_request(B, make_prompt(5)), SequenceMode.PREFILL_ONLY)
    Driver(watch.core).run()
    assert [dict(launch.num_tokens) for launch in watch.launches] == [{B: 2}, {B: 5}]
    watch.core.release_hold(B)


def test_a_cached_prefix_is_told_with_the_first_step() -> None:
    watch = watched()
    for name in (A, B):
        watch.core.add(make_request(name, make_prompt(14)), SequenceMode.PREFILL_ONLY)
        Driver(watch.core).run()
        watch.core.release_hold(name)
    assert [dict(launch.num_tokens) for launch in watch.launches] == [{A: 8}, {A: 14}, {B: 14}]


def test_a_step_that_fails_says_for_ever_how_far_it_got() -> None:
    watch = watched()

    def fail_after_the_first(layer: int) -> None:
        if layer == 0:
            raise RuntimeError("the model broke")

    watch.model.after_layer = fail_after_the_first
    watch.core.add(make_request(A, make_prompt(4)), SequenceMode.PREFILL_ONLY)
    Driver(watch.core).step()
    watch.model.after_layer = lambda layer: None
    watch.core.add(make_request(B, make_prompt(4, salt=1)), SequenceMode.PREFILL_ONLY)
    Driver(watch.core).run()
    assert watch.num_final == [1, 2]
    for name in (A, B):
        watch.core.release_hold(name)


def test_a_step_that_nobody_needs_any_more_makes_nothing_final() -> None:
    """Planned behind another, and everyone in it ended before it ran."""
    watch = watched(async_scheduling="on")
    watch.core.add(make_request(A, make_prompt(20)), SequenceMode.PREFILL_ONLY)
    watch.core.step()
    assert watch.num_final == [2, 0]
    watch.core.release_hold(A)
    Driver(watch.core).settle()
    assert watch.num_final == [2, 0]
    assert watch.core.load().free_blocks == watch.core.load().num_blocks


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_device_tells_by_events_or_when_the_step_has_landed(*, cuda_graphs: bool) -> None:
    """The last chunk is of one token: it is replayed from a graph, where there are any."""
    model = TinyModel()
    core = make_device_core(model, max_num_batched_tokens=8, cuda_graphs=cuda_graphs)
    watch = Watch(core, model)
    core.add(make_request(A, make_prompt(17)), SequenceMode.PREFILL_ONLY)
    Driver(core).run()
    assert [dict(launch.num_tokens) for launch in watch.launches] == [{A: 8}, {A: 16}, {A: 17}]
    assert watch.num_final == [2, 2, 2]
    core.release_hold(A)


class LateEvent:
    def __init__(self) -> None:
        self.has_passed = False
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        raise AssertionError("nobody may wait")

    def query(self) -> bool:
        assert self.is_recorded
        return self.has_passed


class LateDevice(HostDevice):
    def __init__(self) -> None:
        self.events: list[LateEvent] = []

    def event(self) -> DeviceEvent:
        self.events.append(LateEvent())
        return self.events[-1]


def test_marks_of_a_device_count_when_it_has_passed_them() -> None:
    device = LateDevice()
    layers = LayerEvents(device)
    for count in (1, 2, 3):
        layers.mark(count)
    assert layers.num_final_layers == 0
    device.events[1].has_passed = True  # never without the one before
    assert layers.num_final_layers == 0
    device.events[0].has_passed = True
    assert layers.num_final_layers == 2
    layers.land(4)
    assert layers.num_final_layers == 4


def test_readers_that_meet_count_no_mark_that_nobody_has_seen_pass() -> None:
    """The second looks while the first is asking for the same event."""
    device = LateDevice()
    layers = LayerEvents(device)
    seen: list[int] = []

    class Interrupted(LateEvent):
        def query(self) -> bool:
            if not seen:
                seen.append(-1)
                seen.append(layers.num_final_layers)
            return super().query()

    first = Interrupted()
    first.has_passed = True
    device.event = lambda: first  # type: ignore[method-assign]
    layers.mark(1)
    del device.event
    layers.mark(2)
    assert layers.num_final_layers == 1
    assert seen == [-1, 1]
    device.events[0].has_passed = True
    assert layers.num_final_layers == 2


def test_native_code_stores_where_the_counter_says() -> None:
    counter = LayerCounter()
    ctypes.c_int64.from_address(counter.address).value = 7
    assert counter.num_final_layers == 7
    counter.mark(9)
    assert counter.num_final_layers == 9
