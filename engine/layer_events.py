"""A step's progress on a device that works behind the host: one event behind the KV of each layer.

Marks are made while the step is launched, long before the device gets there. A step that is
replayed from a captured graph makes none: all its layers become final at once, when it has landed.
"""

from __future__ import annotations

from isthmus.engine.device import Device, DeviceEvent


class LayerEvents:
    """Implements ``LayerMarks`` for the engine thread and ``LayerProgress`` for any thread."""

    address = 0  # no native code stores here

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: list[tuple[int, DeviceEvent]] = []  # only ever grows: readers go over it
        self._num_passed = 0  # of the marks; readers that meet may set it back, never too far ahead
        self._num_landed = 0

    def mark(self, num_layers: int) -> None:
        event = self._device.event()
        event.record()
        self._marks.append((num_layers, event))

    def land(self, num_layers: int) -> None:
        """The host has waited for the step."""
        self._num_landed = num_layers

    @property
    def num_final_layers(self) -> int:
        marks, passed = self._marks, self._num_passed
        while passed < len(marks) and marks[passed][1].query():
            passed += 1
        self._num_passed = passed
        return max(marks[passed - 1][0] if passed else 0, self._num_landed)
