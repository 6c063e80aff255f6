"""One call of a workload, and what can be done to a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

COPY_OFFSET = 1 << 48  # beyond every block id of a workload


@dataclass(frozen=True, slots=True)
class Call:
    """``due_s`` counts from the start of the workload.

    ``blocks`` name the prompt's leading blocks, as traces do: calls that begin with the same ids
    begin with the same tokens. Without them a prompt is like no other. ``session`` ≥ 0 names the
    conversation that the call is a turn of."""

    index: int
    due_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()
    slo_class: str = ""
    tenant: str = ""
    session: int = -1


def mean_rate(calls: Sequence[Call]) -> float:
    """Calls per second over the span that they stand for: n − 1 gaps are seen of n calls."""
    if len(calls) < 2:
        return float(len(calls))
    return (len(calls) - 1) / max(1e-9, calls[-1].due_s - calls[0].due_s)


def at_rate(calls: Sequence[Call], rate: float) -> list[Call]:
    """The same calls with their times stretched so that they come at ``rate`` per second, from 0
    on; bursts stay bursts. Raises ValueError for a rate that is not positive."""
    if rate <= 0:
        raise ValueError(f"a rate must be positive, not {rate:g}")
    if not calls:
        return []
    factor, start = mean_rate(calls) / rate, calls[0].due_s
    return [replace(call, due_s=(call.due_s - start) * factor) for call in calls]


def repeat(calls: Sequence[Call], copies: int) -> list[Call]:
    """One copy after the other; the prefixes of one copy are not those of another."""
    if copies == 1:
        return list(calls)
    span_s = len(calls) / mean_rate(calls)
    return [
        replace(
            call,
            index=call.index + copy * len(calls),
            due_s=call.due_s + copy * span_s,
            blocks=tuple(block + copy * COPY_OFFSET for block in call.blocks),
        )
        for copy in range(copies)
        for call in calls
    ]
