"""What a prefill instance reports while it computes a prompt and sends its KV.

::

    (PrefixWanted ─) Accepted ─ ChunkSent … ─ FirstToken ─ ChunkSent … ─ Finished
          └──────────────┴───────────┴─────────────┴──────────┴───────── Failed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.common.errors import IsthmusError
from isthmus.common.timeline import Timeline
from isthmus.common.transfer import TransferTicket
from isthmus.common.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class PrefillPrefixWanted:
    """The prefill instance asks for KV of the prompt's first tokens, which the decode instance has
    and it has not: by the ticket the decode instance is the source. Comes first, if at all."""

    ticket: TransferTicket


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillChunkSent:
    """KV of prompt tokens [0, num_tokens) is on its way or there."""

    chunk: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillFirstToken:
    """``finish_reason`` is set when the request ends with this token: decode does not start."""

    token_id: int
    num_cached_tokens: int
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    timeline: Timeline = field(default_factory=Timeline)


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    num_chunks: int
    bytes_sent: int
    timeline: Timeline = field(default_factory=Timeline)


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """``quiesced``: the sender has proof that no write of the transfer is in flight any more."""

    error: IsthmusError
    quiesced: bool


PrefillUpdate = (
    PrefillPrefixWanted
    | PrefillAccepted
    | PrefillChunkSent
    | PrefillFirstToken
    | PrefillFinished
    | PrefillFailed
)
