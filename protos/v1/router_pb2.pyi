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
ROUTE_ACTION_UNSPECIFIED: RouteAction
ROUTE_ACTION_ADMIT: RouteAction
ROUTE_ACTION_QUEUE: RouteAction
ROUTE_ACTION_DEGRADE: RouteAction

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
    __slots__ = ("request_id", "model", "num_prompt_tokens", "slo", "tenant", "max_output_tokens", "exclude", "prefer_decode", "needs_whole_prompt", "hash_chains", "elapsed_ms", "timeout_ms", "may_wait", "gateway_id", "session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    PREFER_DECODE_FIELD_NUMBER: _ClassVar[int]
    NEEDS_WHOLE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    HASH_CHAINS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAY_WAIT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    num_prompt_tokens: int
    slo: _common_pb2.Slo
    tenant: str
    max_output_tokens: int
    exclude: _containers.RepeatedScalarFieldContainer[str]
    prefer_decode: str
    needs_whole_prompt: bool
    hash_chains: _containers.RepeatedScalarFieldContainer[bytes]
    elapsed_ms: float
    timeout_ms: int
    may_wait: bool
    gateway_id: str
    session: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., slo: _Optional[_Union[_common_pb2.Slo, _Mapping]] = ..., tenant: _Optional[str] = ..., max_output_tokens: _Optional[int] = ..., exclude: _Optional[_Iterable[str]] = ..., prefer_decode: _Optional[str] = ..., needs_whole_prompt: _Optional[bool] = ..., hash_chains: _Optional[_Iterable[bytes]] = ..., elapsed_ms: _Optional[float] = ..., timeout_ms: _Optional[int] = ..., may_wait: _Optional[bool] = ..., gateway_id: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: RouteDecision
    def __init__(self, decision: _Optional[_Union[RouteDecision, _Mapping]] = ...) -> None: ...

class RerouteRequest(_message.Message):
    __slots__ = ("failed_instance", "reason", "request")
    FAILED_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    failed_instance: str
    reason: str
    request: RouteRequest
    def __init__(self, failed_instance: _Optional[str] = ..., reason: _Optional[str] = ..., request: _Optional[_Union[RouteRequest, _Mapping]] = ...) -> None: ...

class RerouteResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: RouteDecision
    def __init__(self, decision: _Optional[_Union[RouteDecision, _Mapping]] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("decision_id", "outcome", "timeline", "failed_instance", "tpot_ms", "withdrawn_request_id", "gateway_id", "num_output_tokens")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    FAILED_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    outcome: str
    timeline: _common_pb2.Timeline
    failed_instance: str
    tpot_ms: float
    withdrawn_request_id: str
    gateway_id: str
    num_output_tokens: int
    def __init__(self, decision_id: _Optional[str] = ..., outcome: _Optional[str] = ..., timeline: _Optional[_Union[_common_pb2.Timeline, _Mapping]] = ..., failed_instance: _Optional[str] = ..., tpot_ms: _Optional[float] = ..., withdrawn_request_id: _Optional[str] = ..., gateway_id: _Optional[str] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainedCandidate(_message.Message):
    __slots__ = ("decode", "prefill", "local_reason", "score", "queue_ms", "prefill_ms", "tpot_ms", "cached_tokens")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_REASON_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    decode: str
    prefill: str
    local_reason: str
    score: float
    queue_ms: float
    prefill_ms: float
    tpot_ms: float
    cached_tokens: int
    def __init__(self, decode: _Optional[str] = ..., prefill: _Optional[str] = ..., local_reason: _Optional[str] = ..., score: _Optional[float] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class FilteredInstance(_message.Message):
    __slots__ = ("instance_id", "reason")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    reason: str
    def __init__(self, instance_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("request_id", "num_prompt_tokens", "max_output_tokens", "slo", "tenant", "at_unix_ns", "decision", "error", "candidates", "filtered", "num_filtered", "outcomes", "timeline", "elapsed_ms", "held_for", "tpot_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    NUM_FILTERED_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    HELD_FOR_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_prompt_tokens: int
    max_output_tokens: int
    slo: _common_pb2.Slo
    tenant: str
    at_unix_ns: int
    decision: RouteDecision
    error: _common_pb2.ErrorDetail
    candidates: _containers.RepeatedCompositeFieldContainer[ExplainedCandidate]
    filtered: _containers.RepeatedCompositeFieldContainer[FilteredInstance]
    num_filtered: int
    outcomes: _containers.RepeatedScalarFieldContainer[str]
    timeline: _common_pb2.Timeline
    elapsed_ms: float
    held_for: str
    tpot_ms: float
    def __init__(self, request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., slo: _Optional[_Union[_common_pb2.Slo, _Mapping]] = ..., tenant: _Optional[str] = ..., at_unix_ns: _Optional[int] = ..., decision: _Optional[_Union[RouteDecision, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[ExplainedCandidate, _Mapping]]] = ..., filtered: _Optional[_Iterable[_Union[FilteredInstance, _Mapping]]] = ..., num_filtered: _Optional[int] = ..., outcomes: _Optional[_Iterable[str]] = ..., timeline: _Optional[_Union[_common_pb2.Timeline, _Mapping]] = ..., elapsed_ms: _Optional[float] = ..., held_for: _Optional[str] = ..., tpot_ms: _Optional[float] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("explanations",)
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    explanations: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, explanations: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
