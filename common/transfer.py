"""What two instances tell each other: the offer of first contact and the ticket of one transfer."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common.ids import BlockId, RequestId, TransferId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.types import InstanceRef

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class TransferTicket:
    """Made by the decode instance after it reserved ``target_block_ids``.

    ::

        sequence blocks   0 … first_block−1 | first_block … ceil(num_tokens / block_size)−1
                          decode's own hits | written by the prefill instance into
                                            | target_block_ids[0], target_block_ids[1], …

    The source must not post a write after ``deadline_ns`` (unix time; it travels as time left).
    """

    transfer_id: TransferId
    request_id: RequestId
    source: InstanceRef
    target: InstanceRef
    first_block: int
    target_block_ids: tuple[BlockId, ...]
    num_tokens: int
    layout_hash: str
    deadline_ns: int
    protocol_version: int = PROTOCOL_VERSION

    @property
    def num_blocks(self) -> int:
        return len(self.target_block_ids)


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """One rank's KV store as its peers see it. ``agent_metadata`` is the connector's own."""

    tp_rank: int
    agent_metadata: bytes
    base_address: int
    num_bytes: int
    num_blocks: int
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class TransferOffer:
    """One side of a handshake. Version and layout hash are compared before the rest is used."""

    protocol_version: int
    layout_hash: str
    instance: InstanceRef
    connector: str
    ranks: tuple[RankEndpoint, ...]
