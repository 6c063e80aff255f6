"""Conversations: calls whose prompt is all that was said before, and something new.

Each turn comes a pause after the call before it was due, whatever a server does with that: an
open loop, like everything here. Blocks name the history, so that a prefix cache can find it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus.workload.arrivals import Arrivals, arrival_times
from isthmus.workload.lengths import Lengths
from isthmus.workload.traces import MOONCAKE_BLOCK_TOKENS
from isthmus.workload.types import Call


@dataclass(frozen=True, slots=True)
class Conversations:
    """``turns`` calls each. ``prompt``: new tokens of a turn; ``think_s``: mean of the pause, which
    is exponentially distributed. Block ids are of ``block_tokens`` tokens."""

    turns: int
    prompt: Lengths
    output: Lengths
    think_s: float
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def converse(
    talk: Conversations, arrivals: Arrivals, count: int, rng: np.random.Generator
) -> list[Call]:
    """At least ``count`` calls, of whole conversations, in the order of their time. ``arrivals``
    are those of calls: conversations begin ``turns`` times as rarely."""
    num_sessions = -(-count // talk.turns)
    starts = arrival_times(Arrivals(arrivals.rate / talk.turns, arrivals.cv), num_sessions, rng)
    shape = (num_sessions, talk.turns)
    new = talk.prompt.draw(num_sessions * talk.turns, rng).reshape(shape)
    said = talk.output.draw(num_sessions * talk.turns, rng).reshape(shape)
    pauses = rng.exponential(talk.think_s, shape)
    calls = []
    for session, start_s in enumerate(starts.tolist()):
        due_s, history = start_s, 0
        for turn in range(talk.turns):
            prompt = history + int(new[session, turn])
            first = session << 20  # no conversation has as many blocks
            blocks = tuple(range(first, first + -(-prompt // talk.block_tokens)))
            output = int(said[session, turn])
            calls.append(Call(0, due_s, prompt, output, blocks, session=session))
            due_s += float(pauses[session, turn])
            history = prompt + output
    calls.sort(key=lambda call: call.due_s)
    return [
        Call(i, c.due_s, c.num_prompt_tokens, c.num_output_tokens, c.blocks, session=c.session)
        for i, c in enumerate(calls)
    ]
