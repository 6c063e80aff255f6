"""What two instances tell each other: the offer of first contact and the ticket of one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from isthmus.common.ids import BlockId, RequestId, TransferId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.types import InstanceRef

PROTOCOL_VERSION = 3


class Checksum(Enum):
    """What a sender says about the content of each block."""

    NONE = "none"
    XXH3 = "xxh3"


@dataclass(frozen=True, slots=True)
class TransferTicket:
    """Made by the decode instance after it reserved ``target_block_ids``.

    ::

        sequence blocks   0 … first_block−1 | first_block … ceil(num_tokens / block_size)−1
                          decode's own hits | written by the prefill instance into
                                            | target_block_ids[0], target_block_ids[1], …

    Blocks are the target's, of its size. The source must not post a write after ``deadline_ns``
    (unix time; it travels as time left).
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
    checksum: Checksum = Checksum.NONE

    @property
    def num_blocks(self) -> int:
        return len(self.target_block_ids)

    def tokens_of(self, first_index: int, stop_index: int, block_size: int) -> range:
        """Tokens of ``target_block_ids[first_index:stop_index]``, each of ``block_size``."""
        first, stop = self.first_block + first_index, self.first_block + stop_index
        return range(first * block_size, min(stop * block_size, self.num_tokens))


STAGING_ALIGNMENT = 256  # bytes: a multiple of what any device likes


@dataclass(frozen=True, slots=True)
class ConnectorOffer:
    """One way to reach a rank's KV store."""

    name: str
    metadata: bytes  # the connector's own
    domain: str = ""  # only ends of one domain can use it; "" = wherever they are
    is_direct: bool = False  # devices move the bytes, where both ends say so: RDMA, GPU memory


@dataclass(frozen=True, slots=True)
class RankEndpoint:
    """One rank's KV store as its peers see it, with every connector that this side may use."""

    tp_rank: int
    connectors: tuple[ConnectorOffer, ...]
    base_address: int
    num_bytes: int
    num_blocks: int
    layout: KvLayout

    def connector(self, name: str) -> ConnectorOffer | None:
        return next((offer for offer in self.connectors if offer.name == name), None)

    @property
    def staging_bytes(self) -> int:
        """Room behind the blocks for KV that is converted, aligned."""
        behind = self.num_bytes - self.num_blocks * self.layout.block_bytes
        return max(0, behind // STAGING_ALIGNMENT - 1) * STAGING_ALIGNMENT


@dataclass(frozen=True, slots=True)
class TransferOffer:
    """One side of a handshake. Version and layout hash are compared before the rest is used."""

    protocol_version: int
    layout_hash: str
    instance: InstanceRef
    ranks: tuple[RankEndpoint, ...]
    checksum: Checksum = Checksum.NONE
    """What this side can compute and may; used where both sides offer it."""
