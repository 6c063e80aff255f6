"""One request on one simulated instance: what the engine's sequence is, without tokens.

::

    NEW ─▶ WAITING ─▶ PREFILLING ─▶ DECODING ─▶ ENDED
     │      ▲  ▲  preempted ┘  │         │
     │      │  └───────────────│─────────┘
     │      │                  └─▶ HELD ─▶ ENDED        prefill for another: kept until it is sent
     ├─▶ FETCHING                                       a prefix of it comes from another
     └─▶ RESERVING ─▶ RESERVED ─▶ ARRIVED ─▶ DECODING   its KV comes from another

Blocks belong to FETCHING, PREFILLING, DECODING, HELD, RESERVED and ARRIVED. Any state may end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from isthmus.common.ids import BlockHash, HashChain
from isthmus.common.state_machine import Transitions


class SeqState(Enum):
    NEW = "new"
    FETCHING = "fetching"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    HELD = "held"
    RESERVING = "reserving"
    RESERVED = "reserved"
    ARRIVED = "arrived"
    ENDED = "ended"


_S = SeqState
SEQ_TRANSITIONS: Transitions[SeqState] = Transitions(
    {
        _S.NEW: frozenset({_S.FETCHING, _S.WAITING, _S.RESERVING, _S.ENDED}),
        _S.FETCHING: frozenset({_S.WAITING, _S.ENDED}),
        _S.WAITING: frozenset({_S.PREFILLING, _S.ENDED}),
        _S.PREFILLING: frozenset({_S.DECODING, _S.HELD, _S.WAITING, _S.ENDED}),
        _S.DECODING: frozenset({_S.WAITING, _S.ENDED}),
        _S.HELD: frozenset({_S.ENDED}),
        _S.RESERVING: frozenset({_S.RESERVED, _S.ENDED}),
        _S.RESERVED: frozenset({_S.ARRIVED, _S.ENDED}),
        _S.ARRIVED: frozenset({_S.DECODING, _S.WAITING, _S.ENDED}),
        _S.ENDED: frozenset(),
    }
)


@dataclass(eq=False, slots=True)
class SimSequence:
    """``owner`` is whoever is told about it. ``num_generated`` counts tokens that exist, delivered
    by an earlier instance or not; the sequence ends when there are ``num_output``.

    A prefill for another instance has ``is_for_peer`` and ends with its first token.
    """

    owner: object
    num_prompt: int
    num_output: int
    hashes: HashChain = ()
    num_generated: int = 0
    is_prompt: bool = True  # until its first token of this instance, or the one that came with KV
    tpot_ms: float | None = None
    most_output: int = 0  # tokens that its client allows
    is_for_peer: bool = False
    state: SeqState = SeqState.NEW
    added_ns: int = 0
    num_computed: int = 0
    num_cached: int = 0  # of them from the prefix cache, when it was first admitted
    num_blocks: int = 0  # while it does not decode; then they follow from its length
    refs: list[BlockHash] = field(default_factory=list)  # its blocks that others may share
    base: int = 0  # decoding: tokens − decode steps of the instance
    end_step: int = 0
    started_ns: int = 0  # when its first chunk began
    first_ns: int = 0  # when its first token was there, of this instance or before
    num_first: int = 0  # how many tokens it had then
    is_aborting: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_generated

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return self.num_tokens - self.num_computed

    def take_first_token(self, at_ns: int) -> None:
        """The first of this instance, or the one that came with KV."""
        self.num_generated += 1
        self.is_prompt = False
        if not self.first_ns:
            self.first_ns, self.num_first = at_ns, self.num_generated

    def move_to(self, new: SeqState) -> None:
        self.state = SEQ_TRANSITIONS.check(self.state, new)
