from isthmus.protos.v1 import common_pb2 as _common_pb2
from isthmus.protos.v1 import router_pb2 as _router_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Submit(_message.Message):
    __slots__ = ("request", "decision")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.Request
    decision: _router_pb2.RouteDecision
    def __init__(self, request: _Optional[_Union[_common_pb2.Request, _Mapping]] = ..., decision: _Optional[_Union[_router_pb2.RouteDecision, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("submits", "aborts")
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    aborts: _containers.RepeatedCompositeFieldContainer[Abort]
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., aborts: _Optional[_Iterable[_Union[Abort, _Mapping]]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "num_cached_tokens", "failed_prefills")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_cached_tokens: int
    failed_prefills: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., failed_prefills: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "prompt_logprobs", "timeline")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    timeline: _common_pb2.Timeline
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., timeline: _Optional[_Union[_common_pb2.Timeline, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request_id", "reason", "stop_token_id", "usage", "timeline", "local_reason", "transferred_bytes", "failed_prefills")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_REASON_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILED_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: _common_pb2.FinishReason
    stop_token_id: int
    usage: _common_pb2.Usage
    timeline: _common_pb2.Timeline
    local_reason: str
    transferred_bytes: int
    failed_prefills: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., timeline: _Optional[_Union[_common_pb2.Timeline, _Mapping]] = ..., local_reason: _Optional[str] = ..., transferred_bytes: _Optional[int] = ..., failed_prefills: _Optional[_Iterable[str]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "error", "failed_instance")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FAILED_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: _common_pb2.ErrorDetail
    failed_instance: str
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., failed_instance: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "deltas", "finished", "failed")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    started: _containers.RepeatedCompositeFieldContainer[Started]
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    failed: _containers.RepeatedCompositeFieldContainer[Failed]
    def __init__(self, started: _Optional[_Iterable[_Union[Started, _Mapping]]] = ..., deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[Failed, _Mapping]]] = ...) -> None: ...
