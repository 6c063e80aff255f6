from isthmus.protos.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectorOffer(_message.Message):
    __slots__ = ("name", "metadata", "domain", "is_direct")
    NAME_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    IS_DIRECT_FIELD_NUMBER: _ClassVar[int]
    name: str
    metadata: bytes
    domain: str
    is_direct: bool
    def __init__(self, name: _Optional[str] = ..., metadata: _Optional[bytes] = ..., domain: _Optional[str] = ..., is_direct: _Optional[bool] = ...) -> None: ...

class RankEndpoint(_message.Message):
    __slots__ = ("tp_rank", "base_address", "num_bytes", "num_blocks", "layout", "connectors")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CONNECTORS_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    base_address: int
    num_bytes: int
    num_blocks: int
    layout: _common_pb2.KvLayout
    connectors: _containers.RepeatedCompositeFieldContainer[ConnectorOffer]
    def __init__(self, tp_rank: _Optional[int] = ..., base_address: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., connectors: _Optional[_Iterable[_Union[ConnectorOffer, _Mapping]]] = ...) -> None: ...

class TransferOffer(_message.Message):
    __slots__ = ("protocol_version", "layout_hash", "instance", "ranks", "checksum")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    layout_hash: str
    instance: _common_pb2.InstanceRef
    ranks: _containers.RepeatedCompositeFieldContainer[RankEndpoint]
    checksum: str
    def __init__(self, protocol_version: _Optional[int] = ..., layout_hash: _Optional[str] = ..., instance: _Optional[_Union[_common_pb2.InstanceRef, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankEndpoint, _Mapping]]] = ..., checksum: _Optional[str] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("offer",)
    OFFER_FIELD_NUMBER: _ClassVar[int]
    offer: TransferOffer
    def __init__(self, offer: _Optional[_Union[TransferOffer, _Mapping]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("offer",)
    OFFER_FIELD_NUMBER: _ClassVar[int]
    offer: TransferOffer
    def __init__(self, offer: _Optional[_Union[TransferOffer, _Mapping]] = ...) -> None: ...
