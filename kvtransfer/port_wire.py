"""What a leader's RemotePort and a follower's PortServer say to each other: frames of msgpack.

::

    leader     Call ──▶   ◀── Reply      one for each call that has a number; in any order
    frame      length, 4 bytes, little-endian │ message

Times in a call are of the follower's clock: every reply says what that shows (``now_ns``), which
the leader takes for the time at which the reply came. So it believes the follower's clock to be
behind by as much as a reply takes, and a deadline comes too early rather than too late.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np

from isthmus.common.errors import ErrorDetail, InternalError
from isthmus.common.ids import BlockId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import Checksum, RankEndpoint
from isthmus.kvtransfer.checksums import ChunkContent
from isthmus.kvtransfer.connectors.frames import LENGTH, frame
from isthmus.kvtransfer.conversion import Conversion
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.notification import decode as decode_note
from isthmus.kvtransfer.plan import Side, blocks_of
from isthmus.kvtransfer.writes import Outcome

MessageT = TypeVar("MessageT", bound=msgspec.Struct)

_MAX_FRAME_BYTES = 2**30
UNANSWERED = 0  # the number of a call that wants no reply


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class ContentMessage(_Message, frozen=True):
    """``ChunkContent`` without the layout, which is the follower's own."""

    note: bytes
    block_ids: tuple[int, ...]
    first_token: int
    tokens: tuple[int, int]
    heads: tuple[int, int]
    target_block_size: int
    num_tokens: int
    first_layer: int


class ConversionMessage(_Message, frozen=True):
    """``Conversion``: of the follower's own blocks into others of this dtype and size."""

    block_ids: tuple[int, ...]
    first_token: int
    dtype: str
    block_size: int
    tokens: tuple[int, int]
    heads: tuple[int, int]
    layers: tuple[int, int]
    first_needed: int


class Open(_Message, frozen=True, tag="open"):
    instance_id: str
    epoch: int
    address: str


class Submit(_Message, frozen=True, tag="submit"):
    write: int
    owner: int
    owner_bytes_left: int
    peer: str
    copies: bytes
    notification: bytes
    expires_ns: int
    content: ContentMessage | None
    conversion: ConversionMessage | None


class Withdraw(_Message, frozen=True, tag="withdraw"):
    """A session has ended: what is not posted yet of its writes is not to be."""

    owner: int


class Wake(_Message, frozen=True, tag="wake"):
    pass


class Look(_Message, frozen=True, tag="look"):
    patience_s: float


class AddPeer(_Message, frozen=True, tag="add_peer"):
    peer: RankEndpoint
    connector: str
    timeout_s: float


class RemovePeer(_Message, frozen=True, tag="remove_peer"):
    peer: str
    timeout_s: float


class CountCorrupt(_Message, frozen=True, tag="count_corrupt"):
    content: ContentMessage


class Close(_Message, frozen=True, tag="close"):
    timeout_s: float


Request = Open | Submit | Withdraw | Wake | Look | AddPeer | RemovePeer | CountCorrupt | Close


class Opened(_Message, frozen=True, tag="opened"):
    endpoint: RankEndpoint
    checksum: Checksum


class Seen(_Message, frozen=True, tag="seen"):
    """A ``Sweep``."""

    ended: tuple[tuple[int, Outcome, ErrorDetail | None], ...]
    notifications: tuple[tuple[str, bytes], ...]
    num_posted: int
    error: str
    rates: tuple[tuple[str, float], ...] = ()
    """Bytes per second to peers to whom something has arrived, as measured."""


class Added(_Message, frozen=True, tag="added"):
    peer: str


class Removed(_Message, frozen=True, tag="removed"):
    pass


class Counted(_Message, frozen=True, tag="counted"):
    num_corrupt: int


class Closed(_Message, frozen=True, tag="closed"):
    in_time: bool


class Failed(_Message, frozen=True, tag="failed"):
    error: ErrorDetail


class TimedOut(_Message, frozen=True, tag="timed_out"):
    pass


Result = Opened | Seen | Added | Removed | Counted | Closed | Failed | TimedOut


class Call(_Message, frozen=True):
    number: int
    request: Request


class Reply(_Message, frozen=True):
    number: int
    now_ns: int
    result: Result


def encode(message: Call | Reply) -> bytes:
    return frame(msgspec.msgpack.encode(message))


async def receive(reader: asyncio.StreamReader, kind: type[MessageT]) -> MessageT:
    """Raises EOFError when the other end has closed, and InternalError for what is no message."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > _MAX_FRAME_BYTES:
            raise InternalError("what came from another rank is no frame", stage="transfer")
        payload = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EOFError(str(error)) from error
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as error:
        raise InternalError(f"{kind.__name__} was due: {error}", stage="transfer") from error


def pack_copies(copies: Copies) -> bytes:
    return copies.rows.tobytes()


def unpack_copies(data: bytes) -> Copies:
    return Copies(np.frombuffer(data, dtype=np.int64).reshape(-1, 3))


def pack_content(content: ChunkContent) -> ContentMessage:
    """Only with the blocks that hold the chunk's tokens."""
    block_ids, first_token = _pack_blocks(content.side, content.tokens)
    return ContentMessage(
        note=content.note.encode(),
        block_ids=block_ids,
        first_token=first_token,
        tokens=_bounds(content.tokens),
        heads=_bounds(content.heads),
        target_block_size=content.target_block_size,
        num_tokens=content.num_tokens,
        first_layer=content.first_layer,
    )


def unpack_content(message: ContentMessage, layout: KvLayout) -> ChunkContent:
    """``layout`` is of the rank whose blocks are named."""
    note = decode_note(message.note)
    if note is None:
        raise InternalError("what came from another rank is no notification", stage="transfer")
    side = Side(layout, tuple(map(BlockId, message.block_ids)), message.first_token)
    tokens, heads = range(*message.tokens), range(*message.heads)
    sizes = message.target_block_size, message.num_tokens, message.first_layer
    return ChunkContent(note, side, tokens, heads, *sizes)


def pack_conversion(conversion: Conversion) -> ConversionMessage:
    block_ids, first_token = _pack_blocks(conversion.source, conversion.tokens)
    return ConversionMessage(
        block_ids=block_ids,
        first_token=first_token,
        dtype=conversion.staged.dtype,
        block_size=conversion.staged.block_size,
        tokens=_bounds(conversion.tokens),
        heads=_bounds(conversion.heads),
        layers=_bounds(conversion.layers),
        first_needed=conversion.first_needed,
    )


def unpack_conversion(message: ConversionMessage, layout: KvLayout) -> Conversion:
    """``layout`` is the follower's own."""
    source = Side(layout, tuple(map(BlockId, message.block_ids)), message.first_token)
    staged = replace(layout, dtype=message.dtype, block_size=message.block_size)
    tokens, heads, layers = range(*message.tokens), range(*message.heads), range(*message.layers)
    return Conversion(source, staged, tokens, heads, layers, message.first_needed)


def _pack_blocks(side: Side, tokens: range) -> tuple[tuple[int, ...], int]:
    """The blocks that hold the tokens, and the first token of these blocks."""
    size = side.layout.block_size
    blocks, first = blocks_of(tokens, size), side.first_token // size
    return tuple(side.block_ids[blocks.start - first : blocks.stop - first]), blocks.start * size


def _bounds(numbers: range) -> tuple[int, int]:
    return numbers.start, numbers.stop
