from __future__ import annotations

import grpc
import msgspec
import pytest

from isthmus.common.errors import (
    DrainingError,
    ErrorDetail,
    InternalError,
    IsthmusError,
    TransferTimeoutError,
)


def all_errors() -> list[type[IsthmusError]]:
    found: list[type[IsthmusError]] = []
    queue = [IsthmusError]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue.extend(kind.__subclasses__())
    return found


@pytest.mark.parametrize("kind", all_errors())
def test_error_is_the_same_leaf_on_the_other_side(kind: type[IsthmusError]) -> None:
    error = kind("why", stage="admit", param="n", instance_id="decode-0", retry_after_ms=5)
    packed = msgspec.msgpack.encode(ErrorDetail.of(error))
    back = msgspec.msgpack.decode(packed, type=ErrorDetail).to_error()
    assert back.code == kind.code
    assert (back.message, back.stage, back.param) == ("why", "admit", "n")
    assert (back.instance_id, back.retry_after_ms) == ("decode-0", 5)
    if kind not in (IsthmusError, InternalError):
        assert type(back) is kind


@pytest.mark.parametrize("kind", all_errors())
def test_every_error_has_a_place_in_both_protocols(kind: type[IsthmusError]) -> None:
    assert hasattr(grpc.StatusCode, kind.grpc_status)
    assert 400 <= kind.http_status < 600
    assert kind.openai_type.endswith("_error")


def test_codes_are_distinct() -> None:
    codes = [kind.code for kind in all_errors() if kind is not InternalError]
    assert len(codes) == len(set(codes))


def test_code_of_a_newer_peer_is_an_internal_error() -> None:
    error = ErrorDetail(code="invented_later", message="why").to_error()
    assert type(error) is InternalError
    assert error.message == "why"


def test_retry_helps_where_another_instance_can_do_it() -> None:
    assert DrainingError("x").retryable
    assert TransferTimeoutError("x").retryable
    assert not InternalError("x").retryable
