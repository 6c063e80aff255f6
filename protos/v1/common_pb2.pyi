from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    INSTANCE_STATE_STARTING: _ClassVar[InstanceState]
    INSTANCE_STATE_READY: _ClassVar[InstanceState]
    INSTANCE_STATE_DRAINING: _ClassVar[InstanceState]
    INSTANCE_STATE_SWITCHING: _ClassVar[InstanceState]
    INSTANCE_STATE_STOPPED: _ClassVar[InstanceState]
    INSTANCE_STATE_LOST: _ClassVar[InstanceState]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role
INSTANCE_STATE_UNSPECIFIED: InstanceState
INSTANCE_STATE_STARTING: InstanceState
INSTANCE_STATE_READY: InstanceState
INSTANCE_STATE_DRAINING: InstanceState
INSTANCE_STATE_SWITCHING: InstanceState
INSTANCE_STATE_STOPPED: InstanceState
INSTANCE_STATE_LOST: InstanceState

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "stage", "retryable", "instance_id", "retry_after_ms", "param", "reason", "predicted_ms", "limit_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_MS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    stage: str
    retryable: bool
    instance_id: str
    retry_after_ms: int
    param: str
    reason: str
    predicted_ms: float
    limit_ms: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., stage: _Optional[str] = ..., retryable: _Optional[bool] = ..., instance_id: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., param: _Optional[str] = ..., reason: _Optional[str] = ..., predicted_ms: _Optional[float] = ..., limit_ms: _Optional[float] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("class_name", "ttft_ms", "tpot_ms", "e2e_ms", "quantile", "weight", "is_strict", "on_failure")
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    QUANTILE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    IS_STRICT_FIELD_NUMBER: _ClassVar[int]
    ON_FAILURE_FIELD_NUMBER: _ClassVar[int]
    class_name: str
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    quantile: float
    weight: float
    is_strict: bool
    on_failure: str
    def __init__(self, class_name: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., quantile: _Optional[float] = ..., weight: _Optional[float] = ..., is_strict: _Optional[bool] = ..., on_failure: _Optional[str] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "logprobs", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    seed: int
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "model", "token_ids", "sampling", "arrival_unix_ns", "timeout_ms", "slo", "tenant", "cache_salt", "num_resumed_tokens", "first_token_age_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    arrival_unix_ns: int
    timeout_ms: int
    slo: Slo
    tenant: str
    cache_salt: str
    num_resumed_tokens: int
    first_token_age_ms: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., arrival_unix_ns: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., num_resumed_tokens: _Optional[int] = ..., first_token_age_ms: _Optional[int] = ...) -> None: ...

class AlternativeToken(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[AlternativeToken]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[AlternativeToken, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class TimelineEvent(_message.Message):
    __slots__ = ("event", "at_unix_ns")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    event: str
    at_unix_ns: int
    def __init__(self, event: _Optional[str] = ..., at_unix_ns: _Optional[int] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TimelineEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TimelineEvent, _Mapping]]] = ...) -> None: ...

class InstanceRef(_message.Message):
    __slots__ = ("instance_id", "epoch", "address")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    address: str
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "kind", "order", "tp_rank", "tp_size", "total_kv_heads", "windows")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    kind: str
    order: str
    tp_rank: int
    tp_size: int
    total_kv_heads: int
    windows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model_fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., kind: _Optional[str] = ..., order: _Optional[str] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., total_kv_heads: _Optional[int] = ..., windows: _Optional[_Iterable[int]] = ...) -> None: ...

class LatencyModel(_message.Message):
    __slots__ = ("prefill_base", "prefill_token", "prefill_pair", "decode_base", "decode_seq", "decode_context", "large_batch", "large_base", "large_seq", "large_context")
    PREFILL_BASE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_FIELD_NUMBER: _ClassVar[int]
    DECODE_BASE_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQ_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LARGE_BATCH_FIELD_NUMBER: _ClassVar[int]
    LARGE_BASE_FIELD_NUMBER: _ClassVar[int]
    LARGE_SEQ_FIELD_NUMBER: _ClassVar[int]
    LARGE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    prefill_base: float
    prefill_token: float
    prefill_pair: float
    decode_base: float
    decode_seq: float
    decode_context: float
    large_batch: int
    large_base: float
    large_seq: float
    large_context: float
    def __init__(self, prefill_base: _Optional[float] = ..., prefill_token: _Optional[float] = ..., prefill_pair: _Optional[float] = ..., decode_base: _Optional[float] = ..., decode_seq: _Optional[float] = ..., decode_context: _Optional[float] = ..., large_batch: _Optional[int] = ..., large_base: _Optional[float] = ..., large_seq: _Optional[float] = ..., large_context: _Optional[float] = ...) -> None: ...

class InstanceInfo(_message.Message):
    __slots__ = ("instance_id", "role", "state", "epoch", "address", "metrics_address", "model", "model_path", "kv_layout", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "connector", "latency", "node", "pid", "version", "rank_pids", "zone", "fetch_min_tokens")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_PIDS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    FETCH_MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: Role
    state: InstanceState
    epoch: int
    address: str
    metrics_address: str
    model: str
    model_path: str
    kv_layout: KvLayout
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    connector: str
    latency: LatencyModel
    node: str
    pid: int
    version: str
    rank_pids: _containers.RepeatedScalarFieldContainer[int]
    zone: str
    fetch_min_tokens: int
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[InstanceState, str]] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., model: _Optional[str] = ..., model_path: _Optional[str] = ..., kv_layout: _Optional[_Union[KvLayout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., connector: _Optional[str] = ..., latency: _Optional[_Union[LatencyModel, _Mapping]] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., rank_pids: _Optional[_Iterable[int]] = ..., zone: _Optional[str] = ..., fetch_min_tokens: _Optional[int] = ...) -> None: ...

class StepTotals(_message.Message):
    __slots__ = ("prefill_steps", "prefill_tokens", "prefill_pairs", "beside_seqs", "beside_context", "prefill_ms", "decode_steps", "decode_seqs", "decode_context", "decode_ms")
    PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIRS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_SEQS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    prefill_steps: int
    prefill_tokens: int
    prefill_pairs: float
    beside_seqs: int
    beside_context: int
    prefill_ms: float
    decode_steps: int
    decode_seqs: int
    decode_context: int
    decode_ms: float
    def __init__(self, prefill_steps: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefill_pairs: _Optional[float] = ..., beside_seqs: _Optional[int] = ..., beside_context: _Optional[int] = ..., prefill_ms: _Optional[float] = ..., decode_steps: _Optional[int] = ..., decode_seqs: _Optional[int] = ..., decode_context: _Optional[int] = ..., decode_ms: _Optional[float] = ...) -> None: ...

class LinkRate(_message.Message):
    __slots__ = ("target_id", "bytes_per_s")
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    target_id: str
    bytes_per_s: float
    def __init__(self, target_id: _Optional[str] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("instance_id", "epoch", "seq", "at_unix_ns", "waiting_seqs", "waiting_tokens", "oldest_wait_ms", "running_seqs", "running_context_tokens", "num_blocks", "free_blocks", "held_blocks", "cached_blocks", "inflight_transfer_bytes", "step_ms", "steps", "totals", "links", "prompt_seqs")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SEQS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    seq: int
    at_unix_ns: int
    waiting_seqs: int
    waiting_tokens: int
    oldest_wait_ms: float
    running_seqs: int
    running_context_tokens: int
    num_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    inflight_transfer_bytes: int
    step_ms: float
    steps: int
    totals: StepTotals
    links: _containers.RepeatedCompositeFieldContainer[LinkRate]
    prompt_seqs: int
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., at_unix_ns: _Optional[int] = ..., waiting_seqs: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., oldest_wait_ms: _Optional[float] = ..., running_seqs: _Optional[int] = ..., running_context_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., inflight_transfer_bytes: _Optional[int] = ..., step_ms: _Optional[float] = ..., steps: _Optional[int] = ..., totals: _Optional[_Union[StepTotals, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkRate, _Mapping]]] = ..., prompt_seqs: _Optional[int] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("kind", "hashes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[KvEvent.Kind]
        KIND_STORED: _ClassVar[KvEvent.Kind]
        KIND_REMOVED: _ClassVar[KvEvent.Kind]
        KIND_CLEARED: _ClassVar[KvEvent.Kind]
    KIND_UNSPECIFIED: KvEvent.Kind
    KIND_STORED: KvEvent.Kind
    KIND_REMOVED: KvEvent.Kind
    KIND_CLEARED: KvEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    kind: KvEvent.Kind
    hashes: bytes
    def __init__(self, kind: _Optional[_Union[KvEvent.Kind, str]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class KvEventBatch(_message.Message):
    __slots__ = ("instance_id", "epoch", "first_seq", "events", "is_snapshot")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    first_seq: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    is_snapshot: bool
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_seq: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., is_snapshot: _Optional[bool] = ...) -> None: ...

class TransferTicket(_message.Message):
    __slots__ = ("transfer_id", "request_id", "source", "target", "first_block", "target_block_ids", "num_tokens", "layout_hash", "timeout_ms", "protocol_version", "checksum")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TARGET_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    request_id: str
    source: InstanceRef
    target: InstanceRef
    first_block: int
    target_block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    layout_hash: str
    timeout_ms: int
    protocol_version: int
    checksum: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., source: _Optional[_Union[InstanceRef, _Mapping]] = ..., target: _Optional[_Union[InstanceRef, _Mapping]] = ..., first_block: _Optional[int] = ..., target_block_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., layout_hash: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., protocol_version: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...
