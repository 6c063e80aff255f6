"""What instances tell the cluster that they are part of, and what it may ask of them."""

from __future__ import annotations

from typing import Protocol

from isthmus.common.cluster import LoadReport
from isthmus.common.kv_events import KvEvent
from isthmus.sim.sequence import SimSequence
from isthmus.sim.spec import InstanceSpec


class AnyInstance(Protocol):
    """What a listener may ask of an instance, however it makes its batches."""

    spec: InstanceSpec
    epoch: int

    @property
    def num_sequences(self) -> int: ...

    @property
    def num_prompts(self) -> int:
        """Of its sequences, as its reports tell."""

    def report(self, at_ns: int) -> LoadReport:
        """What it tells at a time, since which nothing of it has changed."""


class Listener(Protocol):
    """Whoever follows sequences through instances. Called at the end of a step."""

    def sampled(self, sequence: SimSequence) -> None:
        """The first token that this instance computes for it."""

    def second_token(self, sequence: SimSequence, at_ns: int) -> None:
        """When the token after the first one will be there (a little ahead of time)."""

    def reserved(self, sequence: SimSequence) -> None: ...

    def finished(self, sequence: SimSequence) -> None: ...

    def cache_changed(self, instance: AnyInstance, events: list[KvEvent]) -> None: ...

    def before_change(self, instance: AnyInstance) -> None:
        """Until now it was as it is: whoever wants a report of that asks for it before it is
        too late."""

    def load_changed(self, instance: AnyInstance) -> None: ...
