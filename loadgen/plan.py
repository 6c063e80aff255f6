"""Which calls a run sends: a trace or a made-up mix, at one rate, as long as asked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isthmus.workload import Arrivals, Call, Mix, at_rate, mean_rate, synthesise


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``trace`` replaces mix and burstiness where it is given. ``scale`` multiplies every length of
    a trace, so that a trace of a large model's users can be played to a small one; its blocks then
    stand for ``scale`` times as many tokens."""

    num_calls: int
    seed: int
    mix: Mix | None = None
    cv: float = 1.0
    trace: Sequence[Call] = ()
    scale: float = 1.0

    def calls(self, rate: float | None) -> list[Call]:
        """At ``rate`` per second; None keeps a trace's own.

        Raises ValueError when there is neither a trace nor a mix, or a mix without a rate."""
        if self.trace:
            chosen = [self._scaled(call) for call in self.trace[: self.num_calls or None]]
            return at_rate(chosen, rate or mean_rate(chosen))
        if self.mix is None or rate is None:
            raise ValueError("a made-up load needs a mix and a rate")
        return synthesise(self.mix, Arrivals(rate, self.cv), self.num_calls, self.seed)

    def _scaled(self, call: Call) -> Call:
        if self.scale == 1.0:
            return call
        return replace(
            call,
            num_prompt_tokens=max(1, round(call.num_prompt_tokens * self.scale)),
            num_output_tokens=max(1, round(call.num_output_tokens * self.scale)),
        )
