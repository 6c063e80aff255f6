"""A step's progress on a device that works behind the host: one event behind the KV of each layer.

Marks are made while the step is launched, long before the device gets there. A step that is
replayed from a captured graph makes none: all its layers become final at once, when it has landed.
"""

from __future__ import annotations

from collections import deque

from isthmus.engine.device import Device, DeviceEvent


class LayerEvents:
    """Implements ``LayerMarks`` for the engine thread and ``LayerProgress`` for one reader."""

    address = 0  # no native code stores here

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ahead: deque[tuple[int, DeviceEvent]] = deque()
        self._num_passed = 0
        self._num_landed = 0

    def mark(self, num_layers: int) -> None:
        event = self._device.event()
        event.record()
        self._ahead.append((num_layers, event))

    def land(self, num_layers: int) -> None:
        """The host has waited for the step."""
        self._num_landed = num_layers

    @property
    def num_final_layers(self) -> int:
        while self._ahead and self._ahead[0][1].query():
            self._num_passed, _ = self._ahead.popleft()
        return max(self._num_passed, self._num_landed)
