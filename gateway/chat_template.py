"""Messages → prompt text with the model's own Jinja template.

Templates come with model files from anywhere, so they run in Jinja's immutable sandbox with the few
helpers that Hugging Face promises them: ``raise_exception``, ``strftime_now``, ``tojson``, loop
controls and ``{% generation %}`` blocks. Whatever a template does wrong is the request's error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from isthmus.common.errors import InvalidRequestError, ModelFileError

JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Mapping[str, "JsonValue"]
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class ChatTemplate:
    """Compiled once; ``render`` may be called from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelFileError when the template is not valid Jinja."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            message = f"the chat template does not compile: {error}"
            raise ModelFileError(message, stage="load") from error
        # The template would make a context of its globals, name by name, for every request.
        self._known = {
            **self._template.globals,
            "tools": None,
            "documents": None,
            **special_tokens,
        }

    def render(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, JsonValue] | None = None,
    ) -> str:
        """Raises InvalidRequestError with the template's own words when it refuses the messages."""
        extra = dict(variables or {})
        if taken := _RESERVED & extra.keys():
            message = f"chat_template_kwargs may not set {', '.join(sorted(taken))}"
            raise InvalidRequestError(message, param="chat_template_kwargs", stage="template")
        try:
            template = self._template
            names = {
                **self._known,
                **extra,
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
            }
            context = Context(template.environment, names, template.name, template.blocks)
            return "".join(template.root_render_func(context))
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # Expressions of a template fail with Python's own errors when a message is unexpected.
            message = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequestError(message, param="messages", stage="template") from error


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks what an assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it does not escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
