"""Every error that crosses a boundary, in one tree.

::

    IsthmusError
    ├── InvalidRequestError            400  the client must change the request
    │   ├── UnsupportedParameterError  400
    │   ├── ContextLengthError         400
    │   ├── RequestTooLargeError       413
    │   ├── InfeasibleSloError         422  strict targets that not even an idle cluster meets
    │   ├── ModelNotFoundError         404
    │   ├── UnknownRouteError          404
    │   ├── MethodNotAllowedError      405
    │   └── AuthenticationError        401
    ├── CapacityError                  503  try again later
    │   ├── RateLimitedError           429
    │   │   ├── QuotaError             429  the tenant has its share
    │   │   └── SloShedError           429  others' targets are kept at the cost of this one
    │   ├── NoInstanceError            503  a pool is empty, or starts, or drains
    │   └── OutOfBlocksError           503  an instance has no KV blocks left
    ├── DeadlineError                  504
    ├── CancelledError                 499  the client went away
    ├── InstanceError                  502  a process failed under the request
    │   ├── InstanceLostError          502
    │   ├── StaleEpochError            502
    │   └── DrainingError              503
    ├── TransferError                  502  KV did not arrive
    │   ├── HandshakeError             502
    │   ├── LayoutMismatchError        502
    │   ├── ChecksumError              502  what arrived is not what was sent
    │   ├── TransferTimeoutError       504
    │   ├── TransferHopelessError      504  KV could not arrive in time, so it was not sent
    │   └── PrefillFailedError         502  final: the operator wants no other attempt
    ├── ModelError                     500  a model cannot be loaded
    │   ├── ModelFileError
    │   ├── UnknownArchitectureError
    │   └── ModelTooLargeError
    ├── ConfigError                    500  the operator must change the configuration
    └── InternalError                  500

A leaf fixes its code, whether a retry may help, its gRPC status, its HTTP status and OpenAI's error
type. ``stage`` says where it happened and is part of the message a client sees; ``reason`` why, in
one word from a small set (the code, where the code says it all); ``predicted_ms`` and ``limit_ms``
what a refusal compared, where it compared times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class IsthmusError(Exception):
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        stage: str = "",
        param: str | None = None,
        instance_id: str = "",
        retry_after_ms: int = 0,
        reason: str = "",
        predicted_ms: float | None = None,
        limit_ms: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.param = param
        self.instance_id = instance_id
        self.retry_after_ms = retry_after_ms
        self.reason = reason or self.code
        self.predicted_ms = predicted_ms
        self.limit_ms = limit_ms


class InvalidRequestError(IsthmusError):
    code = "invalid_request"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"


class UnsupportedParameterError(InvalidRequestError):
    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    code = "request_too_large"
    http_status = 413


class ModelNotFoundError(InvalidRequestError):
    code = "model_not_found"
    grpc_status = "NOT_FOUND"
    http_status = 404


class InfeasibleSloError(InvalidRequestError):
    code = "slo_infeasible"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 422


class UnknownRouteError(InvalidRequestError):
    code = "unknown_route"
    grpc_status = "NOT_FOUND"
    http_status = 404


class MethodNotAllowedError(InvalidRequestError):
    code = "method_not_allowed"
    grpc_status = "UNIMPLEMENTED"
    http_status = 405


class AuthenticationError(InvalidRequestError):
    code = "invalid_api_key"
    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"


class CapacityError(IsthmusError):
    code = "overloaded"
    retryable = True
    grpc_status = "UNAVAILABLE"
    http_status = 503


class RateLimitedError(CapacityError):
    code = "rate_limit_exceeded"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "rate_limit_error"


class QuotaError(RateLimitedError):
    code = "quota_exceeded"


class SloShedError(RateLimitedError):
    code = "slo_shed"


class NoInstanceError(CapacityError):
    code = "no_instance"


class OutOfBlocksError(CapacityError):
    code = "out_of_blocks"
    grpc_status = "RESOURCE_EXHAUSTED"


class DeadlineError(IsthmusError):
    code = "deadline_exceeded"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    openai_type = "timeout_error"


class CancelledError(IsthmusError):
    code = "cancelled"
    grpc_status = "CANCELLED"
    http_status = 499


class InstanceError(IsthmusError):
    code = "instance_error"
    retryable = True
    grpc_status = "UNAVAILABLE"
    http_status = 502


class InstanceLostError(InstanceError):
    code = "instance_lost"


class StaleEpochError(InstanceError):
    code = "stale_epoch"
    grpc_status = "FAILED_PRECONDITION"


class DrainingError(InstanceError):
    code = "draining"
    http_status = 503


class TransferError(IsthmusError):
    code = "transfer_failed"
    retryable = True
    grpc_status = "ABORTED"
    http_status = 502


class HandshakeError(TransferError):
    code = "handshake_failed"


class LayoutMismatchError(TransferError):
    code = "layout_mismatch"
    retryable = False
    grpc_status = "FAILED_PRECONDITION"


class ChecksumError(TransferError):
    code = "checksum_mismatch"
    grpc_status = "DATA_LOSS"


class TransferTimeoutError(TransferError):
    code = "transfer_timeout"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    openai_type = "timeout_error"


class TransferHopelessError(TransferError):
    code = "transfer_hopeless"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    openai_type = "timeout_error"


class PrefillFailedError(TransferError):
    code = "prefill_failed"
    retryable = False


class ModelError(IsthmusError):
    code = "model_error"
    grpc_status = "FAILED_PRECONDITION"


class ModelFileError(ModelError):
    code = "model_file"


class UnknownArchitectureError(ModelError):
    code = "unknown_architecture"


class ModelTooLargeError(ModelError):
    code = "model_too_large"


class ConfigError(IsthmusError):
    code = "config_error"
    grpc_status = "FAILED_PRECONDITION"


class InternalError(IsthmusError):
    code = "internal_error"


def _leaves(root: type[IsthmusError]) -> dict[str, type[IsthmusError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _leaves(child)
    return found


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """An error as it travels: enough to raise the same leaf on the other side."""

    code: str
    message: str
    stage: str = ""
    retryable: bool = False
    instance_id: str = ""
    retry_after_ms: int = 0
    param: str | None = None
    reason: str = ""
    predicted_ms: float | None = None
    limit_ms: float | None = None

    @classmethod
    def of(cls, error: IsthmusError) -> ErrorDetail:
        return cls(
            code=error.code,
            message=error.message,
            stage=error.stage,
            retryable=error.retryable,
            instance_id=error.instance_id,
            retry_after_ms=error.retry_after_ms,
            param=error.param,
            reason=error.reason,
            predicted_ms=error.predicted_ms,
            limit_ms=error.limit_ms,
        )

    def to_error(self) -> IsthmusError:
        """The leaf named by ``code``; an unknown code (a newer peer) becomes InternalError."""
        leaf = _leaves(IsthmusError).get(self.code, InternalError)
        return leaf(
            self.message,
            stage=self.stage,
            param=self.param,
            instance_id=self.instance_id,
            retry_after_ms=self.retry_after_ms,
            reason=self.reason,
            predicted_ms=self.predicted_ms,
            limit_ms=self.limit_ms,
        )
