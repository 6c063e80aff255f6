from isthmus.protos.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortRequest(_message.Message):
    __slots__ = ("transfer_id", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    reason: str
    def __init__(self, transfer_id: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("quiesced",)
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    quiesced: bool
    def __init__(self, quiesced: _Optional[bool] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request", "ticket")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    request: _common_pb2.Request
    ticket: _common_pb2.TransferTicket
    def __init__(self, request: _Optional[_Union[_common_pb2.Request, _Mapping]] = ..., ticket: _Optional[_Union[_common_pb2.TransferTicket, _Mapping]] = ...) -> None: ...

class PrefillPrefixWanted(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.TransferTicket
    def __init__(self, ticket: _Optional[_Union[_common_pb2.TransferTicket, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("num_cached_tokens",)
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    def __init__(self, num_cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillChunkSent(_message.Message):
    __slots__ = ("chunk", "num_tokens")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    num_tokens: int
    def __init__(self, chunk: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PrefillFirstToken(_message.Message):
    __slots__ = ("token_id", "logprob", "prompt_logprobs", "num_cached_tokens", "finish_reason", "timeline")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: _common_pb2.TokenLogprob
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    num_cached_tokens: int
    finish_reason: _common_pb2.FinishReason
    timeline: _common_pb2.Timeline
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[_Union[_common_pb2.TokenLogprob, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., timeline: _Optional[_Union[_common_pb2.Timeline, _Mapping]] = ...) -> None: ...

class PrefillFinished(_message.Message):
    __slots__ = ("num_chunks", "bytes_sent", "timeline")
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    num_chunks: int
    bytes_sent: int
    timeline: _common_pb2.Timeline
    def __init__(self, num_chunks: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., timeline: _Optional[_Union[_common_pb2.Timeline, _Mapping]] = ...) -> None: ...

class PrefillFailed(_message.Message):
    __slots__ = ("error", "quiesced")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUIESCED_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.ErrorDetail
    quiesced: bool
    def __init__(self, error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., quiesced: _Optional[bool] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("accepted", "chunk_sent", "first_token", "finished", "failed", "prefix_wanted")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_WANTED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    chunk_sent: PrefillChunkSent
    first_token: PrefillFirstToken
    finished: PrefillFinished
    failed: PrefillFailed
    prefix_wanted: PrefillPrefixWanted
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., chunk_sent: _Optional[_Union[PrefillChunkSent, _Mapping]] = ..., first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., finished: _Optional[_Union[PrefillFinished, _Mapping]] = ..., failed: _Optional[_Union[PrefillFailed, _Mapping]] = ..., prefix_wanted: _Optional[_Union[PrefillPrefixWanted, _Mapping]] = ...) -> None: ...
