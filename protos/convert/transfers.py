"""What two instances tell each other of a transfer: offers and tickets."""

from __future__ import annotations

from isthmus.common.ids import BlockId, RequestId, TransferId
from isthmus.common.transfer import (
    Checksum,
    ConnectorOffer,
    RankEndpoint,
    TransferOffer,
    TransferTicket,
)
from isthmus.protos.convert.instances import layout_from_pb, layout_to_pb, ref_from_pb, ref_to_pb
from isthmus.protos.convert.times import instant_after, ms_left
from isthmus.protos.v1 import common_pb2 as pb
from isthmus.protos.v1 import transfer_pb2


def ticket_to_pb(ticket: TransferTicket) -> pb.TransferTicket:
    return pb.TransferTicket(
        transfer_id=ticket.transfer_id,
        request_id=ticket.request_id,
        source=ref_to_pb(ticket.source),
        target=ref_to_pb(ticket.target),
        first_block=ticket.first_block,
        target_block_ids=ticket.target_block_ids,
        num_tokens=ticket.num_tokens,
        layout_hash=ticket.layout_hash,
        timeout_ms=ms_left(ticket.deadline_ns),
        protocol_version=ticket.protocol_version,
        checksum=ticket.checksum.value,
    )


def ticket_from_pb(message: pb.TransferTicket) -> TransferTicket:
    return TransferTicket(
        transfer_id=TransferId(message.transfer_id),
        request_id=RequestId(message.request_id),
        source=ref_from_pb(message.source),
        target=ref_from_pb(message.target),
        first_block=message.first_block,
        target_block_ids=tuple(BlockId(block) for block in message.target_block_ids),
        num_tokens=message.num_tokens,
        layout_hash=message.layout_hash,
        deadline_ns=instant_after(message.timeout_ms),
        protocol_version=message.protocol_version,
        checksum=_checksum_from_pb(message.checksum),
    )


def _checksum_from_pb(value: str) -> Checksum:
    """NONE for one that is not known here: whoever counts on it will miss it."""
    return next((each for each in Checksum if each.value == value), Checksum.NONE)


def offer_to_pb(offer: TransferOffer) -> transfer_pb2.TransferOffer:
    return transfer_pb2.TransferOffer(
        protocol_version=offer.protocol_version,
        layout_hash=offer.layout_hash,
        instance=ref_to_pb(offer.instance),
        ranks=[
            transfer_pb2.RankEndpoint(
                tp_rank=rank.tp_rank,
                connectors=[
                    transfer_pb2.ConnectorOffer(
                        name=connector.name,
                        metadata=connector.metadata,
                        domain=connector.domain,
                        is_direct=connector.is_direct,
                    )
                    for connector in rank.connectors
                ],
                base_address=rank.base_address,
                num_bytes=rank.num_bytes,
                num_blocks=rank.num_blocks,
                layout=layout_to_pb(rank.layout),
            )
            for rank in offer.ranks
        ],
        checksum=offer.checksum.value,
    )


def offer_from_pb(message: transfer_pb2.TransferOffer) -> TransferOffer:
    return TransferOffer(
        protocol_version=message.protocol_version,
        layout_hash=message.layout_hash,
        instance=ref_from_pb(message.instance),
        ranks=tuple(
            RankEndpoint(
                tp_rank=rank.tp_rank,
                connectors=tuple(
                    ConnectorOffer(
                        connector.name, connector.metadata, connector.domain, connector.is_direct
                    )
                    for connector in rank.connectors
                ),
                base_address=rank.base_address,
                num_bytes=rank.num_bytes,
                num_blocks=rank.num_blocks,
                layout=layout_from_pb(rank.layout),
            )
            for rank in message.ranks
        ),
        checksum=_checksum_from_pb(message.checksum),
    )
