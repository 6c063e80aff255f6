"""Requests keep their meaning on the way from one process to another."""

from __future__ import annotations

import time
from dataclasses import replace

from isthmus.protos.convert.requests import request_from_pb, request_to_pb
from tests.support.engine_driver import make_prompt, make_request

REQUEST = make_request("r", make_prompt(4), num_resumed_tokens=2)


def test_the_age_of_the_first_token_travels_and_not_its_instant() -> None:
    began_ns = time.time_ns()
    message = request_to_pb(replace(REQUEST, first_token_ns=began_ns - 5_000_000_000))
    assert 5_000 <= message.first_token_age_ms <= 65_000
    received = request_from_pb(message).first_token_ns
    assert received is not None
    assert abs(received - began_ns + 5_000_000_000) < 60_000_000_000


def test_without_a_first_token_there_is_none_at_the_other_end_either() -> None:
    message = request_to_pb(REQUEST)
    assert not message.HasField("first_token_age_ms")
    assert request_from_pb(message).first_token_ns is None
