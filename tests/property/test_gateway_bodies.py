"""Whatever a client sends: it is understood or refused with a typed error, nothing else."""

from __future__ import annotations

import json
from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import BaseModel

from isthmus.common.errors import InvalidRequestError
from isthmus.gateway.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)

MODELS: list[type[BaseModel]] = [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody]
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_value_of_any_parameter(model: type[BaseModel], data: st.DataObject) -> None:
    names = st.sampled_from([*model.model_fields, "tools", "best_of", "response_format", "other"])
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    body |= data.draw(st.dictionaries(names, values, max_size=4))
    with suppress(InvalidRequestError):
        parse_body(model, json.dumps(body).encode())


@given(raw=st.binary(max_size=40))
@settings(deadline=None)
def test_any_bytes(raw: bytes) -> None:
    with suppress(InvalidRequestError):
        parse_body(ChatBody, raw)
