"""An exchange in the words of OpenAI's two generation APIs. Plain dicts: this runs per token.

A token's text in logprobs may be half a character; the chat form gives its exact bytes beside it,
the older form writes such a token as ``bytes:\\xe2\\x82`` so that distinct tokens stay distinct.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from isthmus.common.types import FinishReason, TokenLogprob
from isthmus.gateway.choice import Choice
from isthmus.gateway.event_frame import TextFrame, frame
from isthmus.gateway.exchange import Exchange
from isthmus.gateway.measured import num_cached_tokens, service_report
from isthmus.gateway.plan import ChoiceDelta
from isthmus.gateway.tokenizer import TextTokenizer

LEAST_LOGPROB = -9999.0
"""Stands for −∞, which JSON cannot say."""


class AnswerFormat(Protocol):
    def prepare(self, choice: Choice) -> None:
        """Makes what the choice's first events are made of, before they are waited for."""
        ...

    def frames(self, choice: Choice, delta: ChoiceDelta) -> Iterable[bytes]:
        """The events of what a choice has gained."""
        ...

    def usage_chunk(self, exchange: Exchange) -> dict[str, Any] | None: ...

    def whole(self, exchange: Exchange) -> dict[str, Any]: ...


class ChatFormat:
    """``token_ids`` adds the ids behind the text, as some clients of other servers ask for."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        created: int,
        tokenizer: TextTokenizer,
        *,
        usage: bool,
        token_ids: bool,
    ) -> None:
        self._head = {"id": f"chatcmpl-{answer_id}", "created": created, "model": model}
        self._tokenizer = tokenizer
        self._has_usage = usage
        self._has_token_ids = token_ids
        self._begun: set[int] = set()
        self._text_frames: dict[int, TextFrame] = {}
        self._openings: dict[int, bytes] = {}

    def prepare(self, choice: Choice) -> None:
        if not self._has_token_ids:  # else the prompt's go with whichever choice is first
            self._openings[choice.index] = frame(self._opening(choice.index))
            self._text_frame(choice.index)

    def frames(self, choice: Choice, delta: ChoiceDelta) -> Iterable[bytes]:
        index, frames = choice.index, []
        if index not in self._begun:
            frames.append(self._openings.pop(index, b"") or self._begin(choice))
            self._begun.add(index)
        if _is_text_alone(delta) and not self._has_token_ids:
            frames.append(self._text_frame(index).fill(delta.text))
        elif delta.text or delta.logprobs or delta.finish_reason:
            content = {"content": delta.text} if delta.text else {}
            logprobs = self._logprobs(delta) if delta.logprobs else None
            frames.append(frame(self._chunk(index, content, logprobs, delta)))
        return frames

    def _begin(self, choice: Choice) -> bytes:
        opening = self._opening(choice.index)
        if not self._begun and self._has_token_ids:
            opening["prompt_token_ids"] = choice.prompt.token_ids
        return frame(opening)

    def _opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, ChoiceDelta())

    def _text_frame(self, index: int) -> TextFrame:
        template = self._text_frames.get(index)
        if template is None:
            empty = self._chunk(index, {"content": ""}, None, ChoiceDelta())
            template = self._text_frames[index] = TextFrame(empty, "content")
        return template

    def usage_chunk(self, exchange: Exchange) -> dict[str, Any] | None:
        if not self._has_usage:
            return None
        head = {**self._head, "object": "chat.completion.chunk"}
        return {**head, "choices": [], "usage": usage_of(exchange)}

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = []
        for choice in exchange.choices:
            delta = choice.take()
            part = {
                "index": choice.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta) if delta.logprobs else None,
                "finish_reason": _reason(delta.finish_reason),
                "stop_reason": delta.stop_reason,
            }
            if self._has_token_ids:
                part["token_ids"] = delta.token_ids
            choices.append(part)
        answer = {**self._head, "object": "chat.completion", "choices": choices}
        if self._has_token_ids:
            answer["prompt_token_ids"] = exchange.plan.prompts[0].token_ids
        return {**answer, "usage": usage_of(exchange)}

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None,
        delta: ChoiceDelta,
    ) -> dict[str, Any]:
        part = {
            "index": index,
            "delta": content,
            "logprobs": logprobs,
            "finish_reason": _reason(delta.finish_reason),
        }
        if self._has_token_ids:
            part["token_ids"] = delta.token_ids
        chunk: dict[str, Any] = {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [part],
        }
        if self._has_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        content = []
        for item in delta.logprobs:
            entry = self._token(item.token_id, item.logprob)
            entry["top_logprobs"] = [self._token(token, value) for token, value in item.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(data),
        }


class CompletionFormat:
    """``token_ids`` adds the ids behind the text, of the prompt once for each choice."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        created: int,
        tokenizer: TextTokenizer,
        *,
        usage: bool,
        token_ids: bool,
    ) -> None:
        self._head = {
            "id": f"cmpl-{answer_id}",
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._tokenizer = tokenizer
        self._has_usage = usage
        self._has_token_ids = token_ids
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._text_frames: dict[int, TextFrame] = {}

    def prepare(self, choice: Choice) -> None:
        """Nothing: its first event may have the prompt's text and token ids in it."""

    def frames(self, choice: Choice, delta: ChoiceDelta) -> Iterable[bytes]:
        is_plain = choice.index in self._begun and _is_text_alone(delta)
        if not is_plain or self._has_token_ids:
            return (frame(self._chunk(choice, delta)),)
        template = self._text_frames.get(choice.index)
        if template is None:
            empty = self._chunk(choice, ChoiceDelta())
            template = self._text_frames[choice.index] = TextFrame(empty, "text")
        return (template.fill(delta.text),)

    def _chunk(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": [self._choice(choice, delta)]}
        if self._has_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, exchange: Exchange) -> dict[str, Any] | None:
        if not self._has_usage:
            return None
        return {**self._head, "choices": [], "usage": usage_of(exchange)}

    def whole(self, exchange: Exchange) -> dict[str, Any]:
        choices = [self._choice(choice, choice.take()) for choice in exchange.choices]
        return {**self._head, "choices": choices, "usage": usage_of(exchange)}

    def _choice(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        text = delta.text
        items: list[tuple[int, float | None, Sequence[tuple[int, float]]]] = []
        is_first = choice.index not in self._begun
        if choice.is_echo and is_first:
            text = choice.prompt.text + text
            items += self._prompt_items(choice)
        self._begun.add(choice.index)
        items += [(item.token_id, item.logprob, _with_chosen(item)) for item in delta.logprobs]
        part = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice.index, items) if items else None,
            "finish_reason": _reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if self._has_token_ids:
            part["token_ids"] = delta.token_ids
            if is_first:
                part["prompt_token_ids"] = choice.prompt.token_ids
        return part

    def _prompt_items(
        self, choice: Choice
    ) -> list[tuple[int, float | None, Sequence[tuple[int, float]]]]:
        """Nothing is known of the first token's probability: nothing came before it."""
        if not choice.has_prompt_logprobs:
            return []
        rest = [(p.token_id, p.logprob, _with_chosen(p)) for p in choice.prompt_logprobs]
        return [(choice.prompt.token_ids[0], None, ()), *rest]

    def _logprobs(
        self, index: int, items: Sequence[tuple[int, float | None, Sequence[tuple[int, float]]]]
    ) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        tokens, values, tops, offsets = [], [], [], []
        for token_id, logprob, top in items:
            token = self._text(token_id)
            tokens.append(token)
            values.append(None if logprob is None else max(logprob, LEAST_LOGPROB))
            named = {self._text(other): max(value, LEAST_LOGPROB) for other, value in top}
            tops.append(None if logprob is None else named)
            offsets.append(offset)
            offset += len(token_bytes(self._tokenizer, token_id).decode(errors="ignore"))
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        data = token_bytes(self._tokenizer, token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: TextTokenizer, token_id: int) -> bytes:
    table = tokenizer.token_bytes
    return table[token_id] if token_id < len(table) else b""


def usage_of(exchange: Exchange) -> dict[str, Any]:
    """Every prompt counts once, however many choices were drawn from it. ``isthmus`` is beyond
    OpenAI's: what was promised and what was measured."""
    prompt = sum(len(prompt.token_ids) for prompt in exchange.plan.prompts)
    output = sum(choice.num_output_tokens for choice in exchange.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens(exchange)},
        "isthmus": service_report(exchange, exchange.now_ns()),
    }


def _is_text_alone(delta: ChoiceDelta) -> bool:
    return bool(delta.text) and not delta.logprobs and delta.finish_reason is None


def _with_chosen(item: TokenLogprob) -> Sequence[tuple[int, float]]:
    """The older API lists the chosen token among the alternatives, even beyond the asked number."""
    if not item.top or any(token == item.token_id for token, _ in item.top):
        return item.top
    return (*item.top, (item.token_id, item.logprob))


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
