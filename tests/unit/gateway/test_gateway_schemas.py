"""What is accepted, what is refused, and that the refusal names the parameter."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from isthmus.common.errors import InvalidRequestError, UnsupportedParameterError
from isthmus.gateway.schemas import (
    MAX_FIELDS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)

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


@pytest.mark.parametrize(
    "extra",
    [
        {"n": True},
        {"n": "2"},
        {"n": 2.0},
        {"seed": "1"},
        {"max_tokens": "16"},
        {"logprobs": True},
        {"temperature": "0.5"},
        {"temperature": True},
        {"top_p": "1"},
        {"echo": "yes"},
        {"echo": 1},
        {"stream": "true"},
        {"ignore_eos": 0},
        {"logit_bias": {"1": "3"}},
        {"logit_bias": {"1": True}},
        {"logit_bias": {"01": 5, "1": 7}},
        {"logit_bias": {"00": 5}},
    ],
)
def test_a_value_of_another_type_is_not_taken_for_what_it_looks_like(
    extra: dict[str, object],
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**extra)
    assert (caught.value.param or "").partition(".")[0] in extra
    assert "got " in caught.value.message


def test_a_whole_number_will_do_for_a_fraction() -> None:
    body = completion(temperature=1, top_p=1, logit_bias={"0": 5, "10": -1.5}, presence_penalty=0)
    assert (body.temperature, body.top_p, body.presence_penalty) == (1, 1, 0)
    assert body.logit_bias == {"0": 5, "10": -1.5}


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


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "name", ["prompt", "n", "tools", "stop", "response_format", "logit_bias", "temperature"]
)
def test_deep_nesting_is_refused_by_name_like_any_wrong_value(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**{name: _nested(900)})
    assert (caught.value.param or "").startswith(name)


def test_deep_nesting_within_messages_is_refused() -> None:
    for content in (_nested(900), [{"type": _nested(900)}]):
        with pytest.raises(InvalidRequestError):
            chat(messages=[{"role": "user", "content": content}])
    with pytest.raises(InvalidRequestError):
        chat(messages=_nested(900))


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 2**63},
        {"top_k": 1e30},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}},
    ],
)
def test_numbers_beyond_what_the_engine_can_take_are_refused(extra: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**extra)
    assert caught.value.param in extra


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatBody, {"model": "m", "messages": [1] * MAX_MESSAGES}),
        (ChatBody, {"model": "m", "messages": [CHAT["messages"][0]] * (MAX_MESSAGES + 1)}),
        (TokenizeBody, {"messages": [{}] * MAX_MESSAGES}),
        (DetokenizeBody, {"tokens": ["a"] * 100_000}),
        (CompletionBody, TEXT | {"stop": [{}] * 100_000}),
        (CompletionBody, TEXT | {"stop_token_ids": ["a"] * 100_000}),
        (CompletionBody, TEXT | {f"x{i}": 0 for i in range(MAX_FIELDS)}),
    ],
)
def test_only_the_first_of_many_problems_is_described(
    model: type[BaseModel], body: dict[str, object]
) -> None:
    """Describing each of millions would hold up the event loop for minutes."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(model, json.dumps(body).encode())
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() <= 2  # of the item, and of the list that then has none
