"""What an instance tells the router about its prefix cache, numbered so that gaps show."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.common.ids import BlockHash, InstanceId


@dataclass(frozen=True, slots=True)
class BlocksStored:
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    pass


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events ``first_seq … first_seq + len(events) − 1`` of one epoch.

    ``is_snapshot`` means: forget what you knew of this instance; these events (one BlocksStored
    with everything cached) are the whole truth before ``first_seq + len(events)``.
    """

    instance_id: InstanceId
    epoch: int
    first_seq: int
    events: tuple[KvEvent, ...]
    is_snapshot: bool = False

    @property
    def next_seq(self) -> int:
        return self.first_seq + len(self.events)
