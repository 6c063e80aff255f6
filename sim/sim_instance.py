"""What a cluster asks of a simulated instance, however it makes its batches.

Two kinds answer: ``instance.Instance``, as this system's engine, and
``distserve.PromptsFirstInstance``, as DistServe's simulator.
"""

from __future__ import annotations

from typing import Protocol

from isthmus.sim.listener import AnyInstance
from isthmus.sim.sequence import SimSequence


class SimInstance(AnyInstance, Protocol):
    """One instance at one epoch. Its ``listener`` hears what becomes of sequences."""

    slowness: float
    """Measured / modelled duration of its steps, from the next one on."""

    @property
    def busy_ns(self) -> int: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def num_preempted(self) -> int: ...

    def submit(self, sequence: SimSequence) -> None:
        """A prompt to compute here: for itself or, with ``is_for_peer``, for another instance."""

    def fetch_prefix(self, sequence: SimSequence, num_held: int) -> int:
        """Tokens that a peer, which has the first ``num_held``, shall send before ``sequence`` is
        submitted (``prefix_ended``); 0 = none, submit it now."""

    def prefix_ended(self, sequence: SimSequence, *, has_arrived: bool) -> None:
        """What it waited for is there, or will not come."""

    def reserve(self, sequence: SimSequence) -> None:
        """Blocks for a prompt that another computes; ``reserved`` is called, now or later."""

    def arrived(self, sequence: SimSequence, first_ns: int) -> None:
        """The KV of a reserved sequence is there, and its first token since ``first_ns``."""

    def let_go(self, sequence: SimSequence) -> None:
        """A held sequence's KV has been sent."""

    def abort(self, sequence: SimSequence) -> None:
        """Ends a sequence, at the end of the step at the latest. Nobody is told."""

    def kill(self) -> list[SimSequence]:
        """The process dies. Returns whom it takes along, with the tokens they have got."""

    def check_integrity(self) -> None:
        """AssertionError when counts disagree with the sequences."""
