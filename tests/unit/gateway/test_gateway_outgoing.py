"""What a gateway sends to a decode instance goes together while a message is on its way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from isthmus.common.clock import SystemClock
from isthmus.common.ids import DecisionId, InstanceId, RequestId
from isthmus.common.types import (
    InstanceRef,
    Request,
    RouteAction,
    RouteDecision,
    SamplingParams,
)
from isthmus.gateway import outgoing as module
from isthmus.gateway.outgoing import Outgoing
from isthmus.protos.convert.decisions import decision_from_pb
from isthmus.protos.convert.requests import request_from_pb
from isthmus.protos.v1 import decode_pb2 as pb

REF = InstanceRef(InstanceId("decode-0"), 7, "127.0.0.1:1")
DECISION = RouteDecision(
    DecisionId("d"), RequestId("r"), RouteAction.QUEUE, REF, None, alternate=REF, reason="why"
)


def request(name: str, num_tokens: int = 2) -> Request:
    sampling = SamplingParams(temperature=0.5, logit_bias=((3, -1.5),), stop_token_ids=(1,))
    deadline_ns = SystemClock().now_ns() + 10**12
    return Request(RequestId(name), "tiny", tuple(range(num_tokens)), sampling, 5, deadline_ns)


def names(message: pb.GenerateRequest) -> list[str]:
    return [submit.request.request_id for submit in message.submits]


@pytest.mark.asyncio
async def test_what_comes_before_it_is_taken_goes_in_one_message() -> None:
    outgoing = Outgoing()
    for name in ("a", "b"):
        outgoing.submit(request(name), DECISION)
    outgoing.abort(RequestId("a"), "gone")
    message = await outgoing.take()
    assert names(message) == ["a", "b"]
    assert [(abort.request_id, abort.reason) for abort in message.aborts] == [("a", "gone")]
    later = asyncio.create_task(outgoing.take())
    await asyncio.sleep(0)
    assert not later.done()
    outgoing.abort(RequestId("b"), "gone too")
    assert [abort.request_id for abort in (await later).aborts] == ["b"]


@pytest.mark.asyncio
async def test_every_field_arrives() -> None:
    outgoing, sent = Outgoing(), [request("a"), request("b")]
    for each in sent:
        outgoing.submit(each, DECISION)
    for each, submit in zip(sent, (await outgoing.take()).submits, strict=True):
        received = request_from_pb(submit.request)
        assert abs(received.deadline_ns - each.deadline_ns) < 10**10
        assert replace(received, deadline_ns=each.deadline_ns) == each
        decided = decision_from_pb(submit.decision)
        assert replace(decided, expires_ns=DECISION.expires_ns) == DECISION


@pytest.mark.asyncio
async def test_long_prompts_do_not_add_up_to_a_message_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 10)
    outgoing = Outgoing()
    for name, num_tokens in (("a", 6), ("b", 4), ("c", 1), ("d", 20), ("e", 1)):
        outgoing.submit(request(name, num_tokens), DECISION)
    outgoing.abort(RequestId("a"), "gone")
    messages = [await outgoing.take() for _ in range(4)]
    assert [names(message) for message in messages] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [len(message.aborts) for message in messages] == [0, 0, 0, 1]


@pytest.mark.asyncio
async def test_one_that_cannot_be_sent_leaves_the_others_as_they_were() -> None:
    outgoing = Outgoing()
    broken = replace(request("broken"), token_ids=cast("Any", ("no number",)))
    with pytest.raises(TypeError):
        outgoing.submit(broken, DECISION)
    outgoing.submit(request("a"), DECISION)
    with pytest.raises(TypeError):
        outgoing.submit(broken, DECISION)
    outgoing.submit(request("b"), DECISION)
    assert names(await outgoing.take()) == ["a", "b"]
