"""What is accepted, what is refused, and that the refusal names the parameter."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from isthmus.common.errors import InvalidRequestError, UnsupportedParameterError
from isthmus.gateway.schemas import ChatBody, CompletionBody, parse_body

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}


def chat(**extra: object) -> ChatBody:
    return parse_body(ChatBody, json.dumps(CHAT | extra).encode())


def completion(**extra: object) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps(TEXT | extra).encode())


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"tools": None, "tool_choice": "none", "functions": [], "response_format": None},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_harmless_fields_pass(extra: dict[str, object]) -> None:
    assert chat(**extra).model == "m"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [1]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"warmth": 1}, "warmth"),
        ({"stream_options": {"include_usge": True}, "stream": True}, "stream_options.include_usge"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(extra: dict[str, object], param: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=param.rpartition(".")[2]) as caught:
        chat(**extra)
    assert caught.value.param == param


@pytest.mark.parametrize("extra", [{"best_of": 2}, {"suffix": "x"}])
def test_plain_completions_refuse_theirs(extra: dict[str, object]) -> None:
    with pytest.raises(UnsupportedParameterError):
        completion(**extra)
    assert completion(best_of=1, suffix=None).prompt == ("x",)


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"n": 1000},
        {"presence_penalty": 3},
        {"logit_bias": {"1": 101}},
        {"stop": ["a", ""]},
        {"stop": ["x"] * 17},
        {"stop_token_ids": [-1]},
        {"top_logprobs": 21, "logprobs": True},
        {"max_tokens": 1, "max_completion_tokens": 2},
        {"max_tokens": 0},
        {"stream_options": {"include_usage": True}},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
    ],
)
def test_values_out_of_range_name_their_parameter(extra: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**extra)
    assert re.split(r"[.\[]", caught.value.param or "")[0] in {*extra, "max_tokens"}


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b'{"model": NaN}', b"\xff"])
def test_a_body_that_is_no_object_is_an_invalid_request(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_body(ChatBody, raw)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_all_forms_of_a_prompt(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [True], [-1], [[1.5]], None, 3, [None]])
def test_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_stops_may_be_texts_and_ids() -> None:
    assert chat(stop="x").stop == ("x",)
    assert chat(stop=["x", 5]).stop == ("x", 5)


def test_our_own_answers_may_be_sent_back_as_messages() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    body = chat(messages=[{"role": "developer", "content": "s"}, answer])
    assert [message.for_template() for message in body.messages] == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "x"},
    ]


def test_text_parts_become_one_text_and_others_are_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a\nb"
    with pytest.raises(UnsupportedParameterError, match="image_url"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}])
