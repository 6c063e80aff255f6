"""What a client may send. Whatever we do not honour is refused by name, never ignored.

A field is one of three kinds: supported (declared here), known to OpenAI but not supported (in
``_REFUSED``, with the values that mean "not used"), or unknown (refused as such). ``null`` always
means the default. Values have the type that JSON gives them: ``"2"`` or ``true`` is no number, and
``1`` no truth value; a whole number will do where a fraction may stand.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from isthmus.common.errors import InvalidRequestError, UnsupportedParameterError
from isthmus.common.types import REPETITION_PENALTY_RANGE

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_FIELDS = 256
MAX_MESSAGES = 16_384
MAX_TARGET_MS = 86_400_000  # a day
MAX_SESSION = 256  # characters of a conversation's name
MAX_LOGIT_BIAS = 1_024  # each costs time in every step of every choice
# Bounded: Python refuses to read a number of thousands of digits.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_UNSET: tuple[Any, ...] = (None, [], {}, False)
# Known parameters that are not supported → values that ask for nothing and are accepted.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": _UNSET,
    "tool_choice": (None, "none"),
    "parallel_tool_calls": _UNSET,
    "functions": _UNSET,
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": _UNSET,
    "prediction": _UNSET,
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "use_beam_search": _UNSET,
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "priority": (None, 0),
}
# Labels for the client's own use: they change no output.
_HARMLESS = frozenset({"user", "metadata", "safety_identifier"})
# A client that sends back our own answer includes these empty fields.
_REFUSED_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "tool_calls": _UNSET,
    "function_call": _UNSET,
    "audio": _UNSET,
    "refusal": (None, ""),
    "annotations": _UNSET,
}
Token = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Prompt = str | tuple[int, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)


class Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, data: Any) -> Any:
        """A body may hold millions of items, all wrong: describing each would take minutes."""
        return _at_most(MAX_FIELDS, data) if isinstance(data, dict) else data


class StreamOptions(Body):
    include_usage: StrictBool = False
    include_obfuscation: Literal[False] | None = None


TargetMs = Annotated[StrictFloat, Field(gt=0, le=MAX_TARGET_MS)]


class SloBody(Body):
    """The request's class of service, and targets in place of the class's, in milliseconds."""

    class_name: str | None = Field(None, alias="class")
    ttft_ms: TargetMs | None = None
    tpot_ms: TargetMs | None = None
    e2e_ms: TargetMs | None = None


class GenerationBody(Body):
    """What chat and plain completions share."""

    model: str
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: StrictInt | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: StrictInt | None = Field(None, ge=0)
    min_tokens: StrictInt | None = Field(None, ge=0)
    stop: tuple[str | Token, ...] | None = Field(None, max_length=MAX_STOPS)
    stop_token_ids: tuple[Token, ...] | None = Field(None, fail_fast=True)
    ignore_eos: StrictBool | None = None
    temperature: StrictFloat | None = Field(None, ge=0)
    top_p: StrictFloat | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=-1, lt=2**31)
    min_p: StrictFloat | None = Field(None, ge=0, le=1)
    presence_penalty: StrictFloat | None = Field(None, ge=-2, le=2)
    frequency_penalty: StrictFloat | None = Field(None, ge=-2, le=2)
    repetition_penalty: StrictFloat | None = Field(None, ge=REPETITION_PENALTY_RANGE[0], le=10)
    logit_bias: dict[str, Annotated[StrictFloat, Field(ge=-100, le=100)]] | None = None
    seed: StrictInt | None = None
    cache_salt: str | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SESSION)] | None = None
    return_token_ids: StrictBool | None = None
    slo: SloBody | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        return _without_refused(data, _REFUSED, _HARMLESS)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | int) else _at_most(MAX_STOPS, value)

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        if value and "" in value:
            raise ValueError("a stop string may not be empty")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_by_token_id(cls, value: Any) -> Any:
        """One way to write each id, so that none is named twice."""
        for name in _at_most(MAX_LOGIT_BIAS, value) if isinstance(value, dict) else ():
            if not _TOKEN_ID.fullmatch(name):
                raise ValueError(f"{_short(name)} is not a token id")
        return value

    @model_validator(mode="after")
    def _usage_needs_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed with stream=true",
                param="stream_options",
                stage="validate",
            )
        return self

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        return _without_refused(data, _REFUSED_IN_MESSAGE, frozenset())

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        """Text parts joined by line breaks; other parts are refused by their type."""
        if not isinstance(value, list):
            return value
        for part in _at_most(MAX_MESSAGES, value):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                message = f"content parts of type {_short(kind)} are not supported"
                raise UnsupportedParameterError(message, param="messages", stage="validate")
        return "\n".join(TextPart.model_validate(part).text for part in value)

    def for_template(self) -> dict[str, str]:
        """As templates know it: ``developer`` is OpenAI's newer name of ``system``."""
        fields = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            fields["name"] = self.name
        if self.reasoning_content is not None:
            fields["reasoning_content"] = self.reasoning_content
        return fields


_NOT_TOO_MANY = BeforeValidator(lambda value: _at_most(MAX_MESSAGES, value))


class ChatBody(GenerationBody):
    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, fail_fast=True), _NOT_TOO_MANY]
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    max_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            message = "top_logprobs needs logprobs=true"
            raise InvalidRequestError(message, param="top_logprobs", stage="validate")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            message = "max_tokens and max_completion_tokens disagree: send one of them"
            raise InvalidRequestError(message, param="max_tokens", stage="validate")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    prompt: tuple[Prompt, ...]
    echo: StrictBool | None = None
    logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> tuple[Prompt, ...]:
        return parse_prompts(value)

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens may be 0 only with echo=true"
            raise InvalidRequestError(message, param="max_tokens", stage="validate")
        return self


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...] | None, Field(fail_fast=True), _NOT_TOO_MANY] = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            message = "send either prompt or messages"
            raise InvalidRequestError(message, param="prompt", stage="validate")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: tuple[Token, ...] = Field(fail_fast=True)
    skip_special_tokens: StrictBool = False


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or a list of them; a prompt is a text or a list of token ids.

    Checked by hand: a union of list types would be tried one after the other on every item.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return (_token_prompt(value),)
        if kinds == {str}:
            return tuple(value)
        if kinds == {list} and all(value):
            return tuple(_token_prompt(item) for item in value)
    raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")


def _token_prompt(value: list[Any]) -> tuple[int, ...]:
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**32:
        raise ValueError("token ids must be non-negative integers")
    return tuple(value)


def parse_body(model: type[ModelT], raw: bytes) -> ModelT:
    """Raises InvalidRequestError (or UnsupportedParameterError) naming the first bad parameter."""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        message = f"the body is not valid JSON: {error}"
        raise InvalidRequestError(message, stage="validate") from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error) from error


def _without_refused(
    data: Any, refused: Mapping[str, tuple[Any, ...]], harmless: frozenset[str]
) -> Any:
    if not isinstance(data, dict):
        return data
    for name in refused.keys() & data.keys():
        value = data[name]
        if not any(type(value) is type(unset) and value == unset for unset in refused[name]):
            message = f"{name} is not supported (got {_short(value)})"
            raise UnsupportedParameterError(message, param=name, stage="validate")
    return {key: value for key, value in data.items() if key not in refused and key not in harmless}


def _first_problem(error: ValidationError) -> InvalidRequestError:
    problem = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if problem["type"] == "extra_forbidden":
        message = f"unknown parameter: {path}"
        return UnsupportedParameterError(message, param=path, stage="validate")
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return InvalidRequestError(f"{path} is required", param=path, stage="validate")
    message = f"{path or 'the body'}: {text} (got {_short(problem['input'])})"
    return InvalidRequestError(message, param=path or None, stage="validate")


def _at_most(count: int, value: Any) -> Any:
    """Checked before the items are: Pydantic looks at each of them first."""
    if isinstance(value, list | dict) and len(value) > count:
        raise ValueError(f"has {len(value)} items, at most {count} are allowed")
    return value


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 4, 80, 80


def _short(value: object, limit: int = 80) -> str:
    """Of a value of any size and depth, at the cost of the part that is shown."""
    text = _REPR.repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
