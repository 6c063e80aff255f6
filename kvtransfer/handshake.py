"""First contact between two instances, as checks without effects.

Two phases: version and layout hash are compared before anything else of an offer is read, so that a
peer of another version or model is refused with a readable reason instead of a parse error; only
then are the ranks and their memory looked at. Which connector the two use is ``negotiation``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.common.errors import HandshakeError, LayoutMismatchError, StaleEpochError
from isthmus.common.transfer import PROTOCOL_VERSION, Checksum, RankEndpoint, TransferOffer
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.plan import check_plannable

_STAGE = "handshake"


def make_offer(
    me: InstanceRef,
    ranks: Sequence[RankEndpoint],
    checksum: Checksum = Checksum.NONE,
) -> TransferOffer:
    """``ranks`` are all of the instance's, in their order."""
    return TransferOffer(
        protocol_version=PROTOCOL_VERSION,
        layout_hash=ranks[0].layout.compat_hash,
        instance=me,
        ranks=tuple(ranks),
        checksum=checksum,
    )


def check_offer(ours: TransferOffer, theirs: TransferOffer) -> None:
    """Raises HandshakeError (version, a malformed offer) or LayoutMismatchError, each naming what
    differs. How many ranks either side has is its own affair."""
    _check_version(ours, theirs)
    _check_layout(ours, theirs)
    peer_id = theirs.instance.instance_id
    if theirs.instance.instance_id == ours.instance.instance_id:
        raise HandshakeError(f"{peer_id} shook hands with itself", stage=_STAGE)
    for rank in theirs.ranks:
        needed = rank.num_blocks * rank.layout.block_bytes
        if rank.num_blocks < 1 or needed > rank.num_bytes:
            raise HandshakeError(
                f"{peer_id} offers {rank.num_blocks} blocks of {rank.layout.block_bytes} bytes in "
                f"a region of {rank.num_bytes}",
                stage=_STAGE,
            )


def check_epoch(known: InstanceRef | None, offered: InstanceRef) -> None:
    """Raises StaleEpochError for an instance that has been replaced by a newer self."""
    if known is not None and offered.epoch < known.epoch:
        raise StaleEpochError(
            f"{offered.instance_id} offers epoch {offered.epoch}, but epoch {known.epoch} is known",
            stage=_STAGE,
            instance_id=offered.instance_id,
        )


def _check_version(ours: TransferOffer, theirs: TransferOffer) -> None:
    if theirs.protocol_version != ours.protocol_version:
        raise HandshakeError(
            f"transfer protocol version: {ours.protocol_version} here, "
            f"{theirs.protocol_version} at {theirs.instance.instance_id}",
            stage=_STAGE,
            instance_id=theirs.instance.instance_id,
        )


def _check_layout(ours: TransferOffer, theirs: TransferOffer) -> None:
    peer_id = theirs.instance.instance_id
    if not theirs.ranks:
        raise HandshakeError(f"{peer_id} offers no rank", stage=_STAGE)
    for rank in theirs.ranks:
        check_plannable(ours.ranks[0].layout, rank.layout)
    _check_ranks(theirs)
    layout = theirs.ranks[0].layout
    if theirs.layout_hash != ours.layout_hash or layout.compat_hash != theirs.layout_hash:
        raise LayoutMismatchError(
            f"layout hash: {ours.layout_hash} here, {theirs.layout_hash} at {peer_id}, although "
            "the fields agree",
            stage=_STAGE,
        )


def _check_ranks(offer: TransferOffer) -> None:
    """All of them, each once and in order, with the same blocks."""
    first, size = offer.ranks[0], len(offer.ranks)
    for number, rank in enumerate(offer.ranks):
        layout = rank.layout
        found = (rank.tp_rank, layout.tp_rank, layout.tp_size, layout.block_size, rank.num_blocks)
        if found != (number, number, size, first.layout.block_size, first.num_blocks):
            raise HandshakeError(
                f"{offer.instance.instance_id} offers {size} ranks, of which number {number} is "
                f"rank {rank.tp_rank} ({layout.tp_rank} of {layout.tp_size}) with "
                f"{rank.num_blocks} blocks of {layout.block_size} tokens",
                stage=_STAGE,
            )
