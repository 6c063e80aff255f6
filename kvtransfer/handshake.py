"""First contact between two instances, as checks without effects.

Two phases: version and layout hash are compared before anything else of an offer is read, so that a
peer of another version or model is refused with a readable reason instead of a parse error; only
then are the connector, the ranks and their memory looked at.
"""

from __future__ import annotations

from isthmus.common.errors import HandshakeError, LayoutMismatchError, StaleEpochError
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import PROTOCOL_VERSION, Checksum, RankEndpoint, TransferOffer
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.interface import MemoryRegion
from isthmus.kvtransfer.plan import check_plannable

_STAGE = "handshake"


def make_offer(
    me: InstanceRef,
    connector: str,
    metadata: bytes,
    region: MemoryRegion,
    num_blocks: int,
    layout: KvLayout,
    checksum: Checksum = Checksum.NONE,
) -> TransferOffer:
    return TransferOffer(
        protocol_version=PROTOCOL_VERSION,
        layout_hash=layout.compat_hash,
        instance=me,
        connector=connector,
        ranks=(
            RankEndpoint(
                tp_rank=layout.tp_rank,
                agent_metadata=metadata,
                base_address=region.base_address,
                num_bytes=region.num_bytes,
                num_blocks=num_blocks,
                layout=layout,
            ),
        ),
        checksum=checksum,
    )


def check_offer(ours: TransferOffer, theirs: TransferOffer) -> RankEndpoint:
    """The peer's rank to talk to.

    Raises HandshakeError (version, connector, a malformed offer) or LayoutMismatchError, each
    naming what differs.
    """
    _check_version(ours, theirs)
    _check_layout(ours, theirs)
    peer_id = theirs.instance.instance_id
    if theirs.instance.instance_id == ours.instance.instance_id:
        raise HandshakeError(f"{peer_id} shook hands with itself", stage=_STAGE)
    if theirs.connector != ours.connector:
        raise HandshakeError(
            f"connector: {ours.connector} here, {theirs.connector} at {peer_id}", stage=_STAGE
        )
    rank = theirs.ranks[0]
    needed = rank.num_blocks * rank.layout.block_bytes
    if rank.num_blocks < 1 or needed > rank.num_bytes:
        raise HandshakeError(
            f"{peer_id} offers {rank.num_blocks} blocks of {rank.layout.block_bytes} bytes in a "
            f"region of {rank.num_bytes}",
            stage=_STAGE,
        )
    return rank


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
    if not theirs.ranks:
        raise HandshakeError(f"{theirs.instance.instance_id} offers no rank", stage=_STAGE)
    if len(theirs.ranks) != len(ours.ranks):
        raise LayoutMismatchError(
            f"ranks: {len(ours.ranks)} here, {len(theirs.ranks)} at {theirs.instance.instance_id}",
            stage=_STAGE,
        )
    ours_layout, layout = ours.ranks[0].layout, theirs.ranks[0].layout
    check_plannable(ours_layout, layout)
    for name, here, there in (
        ("tp_size", ours_layout.tp_size, layout.tp_size),
        ("tp_rank", ours_layout.tp_rank, layout.tp_rank),
    ):
        if here != there:  # plannable, but one rank of each is all that a manager drives
            raise LayoutMismatchError(f"{name}: {here} here, {there} there", stage=_STAGE)
    if theirs.layout_hash != ours.layout_hash or layout.compat_hash != theirs.layout_hash:
        raise LayoutMismatchError(
            f"layout hash: {ours.layout_hash} here, {theirs.layout_hash} at "
            f"{theirs.instance.instance_id}, although the fields agree",
            stage=_STAGE,
        )
