from isthmus.protos.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _common_pb2.InstanceInfo
    def __init__(self, info: _Optional[_Union[_common_pb2.InstanceInfo, _Mapping]] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _common_pb2.LoadReport
    def __init__(self, report: _Optional[_Union[_common_pb2.LoadReport, _Mapping]] = ...) -> None: ...

class WatchKvEventsRequest(_message.Message):
    __slots__ = ("epoch", "from_seq")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    from_seq: int
    def __init__(self, epoch: _Optional[int] = ..., from_seq: _Optional[int] = ...) -> None: ...

class WatchKvEventsResponse(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: _common_pb2.KvEventBatch
    def __init__(self, batch: _Optional[_Union[_common_pb2.KvEventBatch, _Mapping]] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("state", "running_requests", "held_transfers")
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HELD_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    state: _common_pb2.InstanceState
    running_requests: int
    held_transfers: int
    def __init__(self, state: _Optional[_Union[_common_pb2.InstanceState, str]] = ..., running_requests: _Optional[int] = ..., held_transfers: _Optional[int] = ...) -> None: ...

class ListPeersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPeersResponse(_message.Message):
    __slots__ = ("connectors",)
    class ConnectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CONNECTORS_FIELD_NUMBER: _ClassVar[int]
    connectors: _containers.ScalarMap[str, str]
    def __init__(self, connectors: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityResponse(_message.Message):
    __slots__ = ("is_clean", "problem", "load", "sessions_by_state")
    class SessionsByStateEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    IS_CLEAN_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_BY_STATE_FIELD_NUMBER: _ClassVar[int]
    is_clean: bool
    problem: str
    load: _common_pb2.LoadReport
    sessions_by_state: _containers.ScalarMap[str, int]
    def __init__(self, is_clean: _Optional[bool] = ..., problem: _Optional[str] = ..., load: _Optional[_Union[_common_pb2.LoadReport, _Mapping]] = ..., sessions_by_state: _Optional[_Mapping[str, int]] = ...) -> None: ...
