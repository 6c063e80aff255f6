"""Errors that travel."""

from __future__ import annotations

from isthmus.common.errors import ErrorDetail, IsthmusError
from isthmus.protos.v1 import common_pb2 as pb


def error_to_pb(error: IsthmusError) -> pb.ErrorDetail:
    detail = ErrorDetail.of(error)
    return pb.ErrorDetail(
        code=detail.code,
        message=detail.message,
        stage=detail.stage,
        retryable=detail.retryable,
        instance_id=detail.instance_id,
        retry_after_ms=detail.retry_after_ms,
        param=detail.param,
        reason=detail.reason,
        predicted_ms=detail.predicted_ms,
        limit_ms=detail.limit_ms,
    )


def error_from_pb(message: pb.ErrorDetail) -> IsthmusError:
    return ErrorDetail(
        code=message.code,
        message=message.message,
        stage=message.stage,
        retryable=message.retryable,
        instance_id=message.instance_id,
        retry_after_ms=message.retry_after_ms,
        param=message.param if message.HasField("param") else None,
        reason=message.reason,
        predicted_ms=message.predicted_ms if message.HasField("predicted_ms") else None,
        limit_ms=message.limit_ms if message.HasField("limit_ms") else None,
    ).to_error()
