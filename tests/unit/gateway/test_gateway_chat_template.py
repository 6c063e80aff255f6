"""Templates render as transformers renders them, and what they refuse is the request's error."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.common.errors import InvalidRequestError, ModelFileError
from isthmus.common.gguf_file import read_gguf
from isthmus.common.model_files import sample_model_path
from isthmus.gateway.chat_template import ChatTemplate

chat_utils = pytest.importorskip("transformers.utils.chat_template_utils")

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&'\"</b> 😀"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "reasoning_content": "why"},
        {"role": "user", "content": "\n 3 "},
    ],
]
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.role == "assistant" %}
        {%- generation %}{{- " " + message.content + eos_token }}{%- endgeneration %}
    {%- else %}{%- continue %}
    {%- endif %}
{%- endfor %}"""
QWEN_LIKE = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined and enable_thinking %}
<think>{{ message.reasoning_content }}</think>
{% endif %}
{{ message.content | tojson }}<|im_end|>
{%- endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ ns.last }}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def sample_template() -> str:
    template = read_gguf(sample_model_path()).metadata["tokenizer.chat_template"]
    assert isinstance(template, str)
    return template


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", ["sample", "llama3", "mistral", "qwen"])
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers(
    name: str, messages: list[dict[str, Any]], prompt: bool, sample_template: str
) -> None:
    sources = {"llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN_LIKE, "sample": sample_template}
    source = sources[name]
    rendered = ChatTemplate(source, SPECIAL).render(
        messages, add_generation_prompt=prompt, variables={"enable_thinking": True}
    )
    expected, _ = chat_utils.render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=prompt,
        enable_thinking=True,
        **SPECIAL,
    )
    assert rendered == expected[0]


def test_strftime_now_is_known() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([])
    assert text.isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7]['role'] + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_raise_exception_keeps_the_templates_own_words() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])


def test_variables_may_not_replace_the_messages() -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        ChatTemplate("x", {}).render([], variables={"messages": []})


def test_a_template_that_does_not_compile_is_a_model_file_error() -> None:
    with pytest.raises(ModelFileError, match="does not compile"):
        ChatTemplate("{% for %}", {})
