"""Changes of a prefix cache."""

from __future__ import annotations

from isthmus.common.ids import HASH_BYTES, BlockHash, InstanceId
from isthmus.common.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    KvEventBatch,
)
from isthmus.protos.v1 import common_pb2 as pb


def split_hashes(data: bytes) -> tuple[BlockHash, ...]:
    """Whole hashes only: what is cut off at the end is none."""
    whole = len(data) - len(data) % HASH_BYTES
    return tuple(
        BlockHash(data[start : start + HASH_BYTES]) for start in range(0, whole, HASH_BYTES)
    )


def kv_batch_to_pb(batch: KvEventBatch) -> pb.KvEventBatch:
    return pb.KvEventBatch(
        instance_id=batch.instance_id,
        epoch=batch.epoch,
        first_seq=batch.first_seq,
        events=[_kv_event_to_pb(event) for event in batch.events],
        is_snapshot=batch.is_snapshot,
    )


def _kv_event_to_pb(event: KvEvent) -> pb.KvEvent:
    match event:
        case BlocksStored(hashes):
            return pb.KvEvent(kind=pb.KvEvent.KIND_STORED, hashes=b"".join(hashes))
        case BlocksRemoved(hashes):
            return pb.KvEvent(kind=pb.KvEvent.KIND_REMOVED, hashes=b"".join(hashes))
        case CacheCleared():
            return pb.KvEvent(kind=pb.KvEvent.KIND_CLEARED)


def kv_batch_from_pb(message: pb.KvEventBatch) -> KvEventBatch:
    return KvEventBatch(
        instance_id=InstanceId(message.instance_id),
        epoch=message.epoch,
        first_seq=message.first_seq,
        events=tuple(_kv_event_from_pb(event) for event in message.events),
        is_snapshot=message.is_snapshot,
    )


def _kv_event_from_pb(message: pb.KvEvent) -> KvEvent:
    """One that is not known here changes nothing, but keeps its number in the sequence."""
    match message.kind:
        case pb.KvEvent.KIND_STORED:
            return BlocksStored(split_hashes(message.hashes))
        case pb.KvEvent.KIND_REMOVED:
            return BlocksRemoved(split_hashes(message.hashes))
        case pb.KvEvent.KIND_CLEARED:
            return CacheCleared()
        case _:
            return BlocksStored(())
