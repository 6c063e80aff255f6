from isthmus.protos.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUTE_ACTION_UNSPECIFIED: _ClassVar[RouteAction]
    ROUTE_ACTION_ADMIT: _ClassVar[RouteAction]
    ROUTE_ACTION_QUEUE: _ClassVar[RouteAction]
    ROUTE_ACTION_DEGRADE: _ClassVar[RouteAction]
    ROUTE_ACTION_REJECT: _ClassVar[RouteAction]
ROUTE_ACTION_UNSPECIFIED: RouteAction
ROUTE_ACTION_ADMIT: RouteAction
ROUTE_ACTION_QUEUE: RouteAction
ROUTE_ACTION_DEGRADE: RouteAction
ROUTE_ACTION_REJECT: RouteAction

class RouteDecision(_message.Message):
    __slots__ = ("decision_id", "request_id", "action", "decode", "prefill", "local_reason", "cached_tokens", "predicted_ttft_ms", "predicted_tpot_ms", "policy", "reason", "ttl_ms", "alternate")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATE_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    request_id: str
    action: RouteAction
    decode: _common_pb2.InstanceRef
    prefill: _common_pb2.InstanceRef
    local_reason: str
    cached_tokens: int
    predicted_ttft_ms: float
    predicted_tpot_ms: float
    policy: str
    reason: str
    ttl_ms: int
    alternate: _common_pb2.InstanceRef
    def __init__(self, decision_id: _Optional[str] = ..., request_id: _Optional[str] = ..., action: _Optional[_Union[RouteAction, str]] = ..., decode: _Optional[_Union[_common_pb2.InstanceRef, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.InstanceRef, _Mapping]] = ..., local_reason: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., predicted_ttft_ms: _Optional[float] = ..., predicted_tpot_ms: _Optional[float] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., alternate: _Optional[_Union[_common_pb2.InstanceRef, _Mapping]] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("request_id", "model", "num_prompt_tokens", "block_hashes", "slo", "priority", "tenant", "max_output_tokens", "exclude", "prefer_decode", "needs_whole_prompt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    PREFER_DECODE_FIELD_NUMBER: _ClassVar[int]
    NEEDS_WHOLE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    num_prompt_tokens: int
    block_hashes: bytes
    slo: _common_pb2.Slo
    priority: int
    tenant: str
    max_output_tokens: int
    exclude: _containers.RepeatedScalarFieldContainer[str]
    prefer_decode: str
    needs_whole_prompt: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., block_hashes: _Optional[bytes] = ..., slo: _Optional[_Union[_common_pb2.Slo, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., max_output_tokens: _Optional[int] = ..., exclude: _Optional[_Iterable[str]] = ..., prefer_decode: _Optional[str] = ..., needs_whole_prompt: _Optional[bool] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: RouteDecision
    def __init__(self, decision: _Optional[_Union[RouteDecision, _Mapping]] = ...) -> None: ...

class RerouteRequest(_message.Message):
    __slots__ = ("decision_id", "failed_instance", "reason", "slack_ms", "request")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SLACK_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    failed_instance: str
    reason: str
    slack_ms: float
    request: RouteRequest
    def __init__(self, decision_id: _Optional[str] = ..., failed_instance: _Optional[str] = ..., reason: _Optional[str] = ..., slack_ms: _Optional[float] = ..., request: _Optional[_Union[RouteRequest, _Mapping]] = ...) -> None: ...

class RerouteResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: RouteDecision
    def __init__(self, decision: _Optional[_Union[RouteDecision, _Mapping]] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("decision_id", "outcome", "timeline", "usage", "failed_instance")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FAILED_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    outcome: str
    timeline: _common_pb2.Timeline
    usage: _common_pb2.Usage
    failed_instance: str
    def __init__(self, decision_id: _Optional[str] = ..., outcome: _Optional[str] = ..., timeline: _Optional[_Union[_common_pb2.Timeline, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., failed_instance: _Optional[str] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
