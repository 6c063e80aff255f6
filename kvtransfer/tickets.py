"""What must be true of a ticket before a session may be opened on it: checks without effects."""

from __future__ import annotations

from isthmus.common.errors import (
    DeadlineError,
    HandshakeError,
    LayoutMismatchError,
    StaleEpochError,
    TransferError,
)
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import PROTOCOL_VERSION, TransferTicket
from isthmus.common.types import InstanceRef

_STAGE = "transfer"


def check_ticket(
    ticket: TransferTicket,
    addressee: InstanceRef,
    me: InstanceRef,
    target: KvLayout,
    num_target_blocks: int,
    now_ns: int,
) -> None:
    """``addressee`` is the ticket's source or target, whichever is on this side; ``target`` is the
    layout of the target's blocks and ``now_ns`` unix time.

    Raises HandshakeError (version), StaleEpochError (meant for another instance or epoch),
    LayoutMismatchError, DeadlineError, or TransferError for target blocks that cannot be right.
    """
    if ticket.protocol_version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"ticket of protocol version {ticket.protocol_version}, {PROTOCOL_VERSION} here",
            stage=_STAGE,
        )
    if (addressee.instance_id, addressee.epoch) != (me.instance_id, me.epoch):
        raise StaleEpochError(
            f"the ticket names {addressee.instance_id} of epoch {addressee.epoch}, this is "
            f"{me.instance_id} of epoch {me.epoch}",
            stage=_STAGE,
            instance_id=me.instance_id,
        )
    if ticket.layout_hash != target.compat_hash:
        raise LayoutMismatchError(
            f"layout hash: {target.compat_hash} here, {ticket.layout_hash} in the ticket",
            stage=_STAGE,
        )
    if now_ns >= ticket.deadline_ns:
        raise DeadlineError("the ticket's deadline has passed", stage=_STAGE)
    _check_blocks(ticket, target, num_target_blocks)


def _check_blocks(ticket: TransferTicket, target: KvLayout, num_target_blocks: int) -> None:
    blocks = ticket.target_block_ids
    end = -(-ticket.num_tokens // target.block_size)
    if not blocks or ticket.first_block + len(blocks) != end:
        raise TransferError(
            f"{len(blocks)} target blocks from block {ticket.first_block} on do not hold "
            f"{ticket.num_tokens} tokens",
            stage=_STAGE,
        )
    if len(set(blocks)) != len(blocks):
        raise TransferError("a target block appears twice", stage=_STAGE)
    if min(blocks) < 0 or max(blocks) >= num_target_blocks:
        raise TransferError(f"a target block is not among {num_target_blocks}", stage=_STAGE)
