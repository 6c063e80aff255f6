"""Pinned staging: what is put arrives, two turns do not disturb each other, large arrays too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.engine.device import DeviceEvent, HostDevice
from isthmus.engine.staging import Buffer, Readback, Staging


class LoggedEvent:
    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name

    def record(self) -> None:
        self._log.append(f"record {self._name}")

    def synchronize(self) -> None:
        self._log.append(f"wait {self._name}")


class LoggedDevice(HostDevice):
    """Tells which events were recorded and waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._num_events = 0

    def event(self) -> DeviceEvent:
        self._num_events += 1
        return LoggedEvent(self.log, str(self._num_events - 1))


BUFFERS = {"ids": Buffer(6, torch.int64), "lengths": Buffer(4, torch.int32)}


def test_arrays_arrive_with_their_shape_at_an_address_that_stays() -> None:
    staging = Staging(HostDevice(), BUFFERS)
    addresses = set()
    for length in (1, 6, 4):
        staging.begin()
        ids = staging.put("ids", np.arange(length))
        table = staging.put("lengths", np.full((2, 2), length, dtype=np.int32))
        staging.end()
        assert ids.tolist() == list(range(length))
        assert table.tolist() == [[length] * 2] * 2
        addresses.add((ids.data_ptr(), table.data_ptr()))
    assert len(addresses) == 1


def test_array_beyond_its_buffer_gets_memory_of_its_own() -> None:
    staging = Staging(HostDevice(), BUFFERS)
    staging.begin()
    small = staging.put("ids", np.arange(2))
    large = staging.put("ids", np.arange(50))
    assert large.tolist() == list(range(50))
    assert small.tolist() == [0, 1]


def test_a_turn_waits_for_its_own_copies_of_two_steps_ago() -> None:
    device = LoggedDevice()
    staging = Staging(device, BUFFERS)
    for _ in range(3):
        staging.begin()
        staging.put("ids", np.arange(3))
        staging.end()
    assert device.log == ["wait 1", "record 1", "wait 0", "record 0", "wait 1", "record 1"]


def test_results_of_two_steps_are_read_in_turn() -> None:
    device = LoggedDevice()
    readback = Readback(device, {"ids": Buffer(3, torch.int64)})
    turns, arrays = [], []
    for step in range(2):
        turns.append(readback.begin())
        arrays.append(readback.put("ids", torch.full((3,), step)))
        readback.end()
    for turn in turns:
        readback.wait(turn)
    assert [array.tolist() for array in arrays] == [[0] * 3, [1] * 3]
    assert device.log == ["record 1", "record 0", "wait 1", "wait 0"]


@pytest.mark.parametrize("shape", [(2, 5), (0,), (3, 1)])
def test_results_of_any_size_keep_their_shape(shape: tuple[int, ...]) -> None:
    readback = Readback(HostDevice(), {"top": Buffer(4, torch.float32)})
    readback.begin()
    tensor = torch.randn(shape)
    assert np.array_equal(readback.put("top", tensor), tensor.numpy())
    assert np.array_equal(readback.send(tensor), tensor.numpy())
