"""One streamed completion over HTTP, followed chunk by chunk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from isthmus.loadgen.types import Record, Status, Targets

_TOO_MANY, _UNAVAILABLE, _INFEASIBLE, _GATEWAY_TIMEOUT = 429, 503, 422, 504
_REJECTIONS = frozenset({_TOO_MANY, _UNAVAILABLE, _INFEASIBLE, _GATEWAY_TIMEOUT})
_OK = 200
_PROBLEM_CHARS = 200
_END = "data: [DONE]"


@dataclass(slots=True)
class Endpoint:
    """An OpenAI-compatible server. Use as an async context manager, on one event loop.

    With ``targets`` each call carries them, and its class, in Isthmus's headers, which other
    servers ignore. ``api_keys`` maps a call's tenant to its key; "" is everybody else's.
    ``timeout_s``: the longest silence; ``deadline_s``: the longest that a whole call may take, for
    a server that always sends something and never ends.
    """

    url: str
    model: str
    timeout_s: float = 600.0
    deadline_s: float = 1_800.0
    targets: Targets | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    _client: httpx.AsyncClient | None = field(default=None, repr=False)

    async def __aenter__(self) -> Self:
        # Open loop: whatever is due is sent, however many are waiting.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(timeout=self.timeout_s, limits=limits, trust_env=False)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._client is not None
        await self._client.aclose()

    async def follow(
        self, record: Record, prompt: list[int] | str, now_s: Callable[[], float]
    ) -> None:
        """Sends the record's call and writes into it until the answer has ended. Never raises for
        what a server or a network may do."""
        assert self._client is not None, "enter the endpoint first"
        record.sent_s = now_s()
        try:
            async with asyncio.timeout(self.deadline_s):
                await self._exchange(self._client, record, prompt, now_s)
        except TimeoutError:
            record.status, record.problem = Status.TIMEOUT, f"no end in {self.deadline_s:g} s"
        except httpx.TimeoutException:
            record.status, record.problem = Status.TIMEOUT, f"no answer in {self.timeout_s:g} s"
        except httpx.HTTPError as error:
            record.status, record.problem = Status.ERROR, f"{type(error).__name__}: {error}"
        finally:
            record.ended_s = now_s()

    async def _exchange(
        self,
        client: httpx.AsyncClient,
        record: Record,
        prompt: list[int] | str,
        now_s: Callable[[], float],
    ) -> None:
        headers, body = self._headers(record), self._body(record, prompt)
        url = f"{self.url}/v1/completions"
        async with client.stream("POST", url, json=body, headers=headers) as response:
            record.http_status = response.status_code
            if response.status_code != _OK:
                is_rejection = response.status_code in _REJECTIONS
                record.status = Status.REJECTED if is_rejection else Status.ERROR
                text = (await response.aread())[:_PROBLEM_CHARS]
                record.problem = text.decode(errors="replace")
                return
            await _read_events(record, response, now_s)

    def _headers(self, record: Record) -> dict[str, str]:
        headers: dict[str, str] = {}
        key = self.api_keys.get(record.call.tenant) or self.api_keys.get("")
        if key:
            headers["authorization"] = f"Bearer {key}"
        if record.call.slo_class:
            headers["x-isthmus-slo-class"] = record.call.slo_class
        if self.targets is not None:
            for name, value in (("ttft", self.targets.ttft_ms), ("tpot", self.targets.tpot_ms)):
                if value is not None:
                    headers[f"x-isthmus-{name}-ms"] = f"{value:g}"
        return headers

    def _body(self, record: Record, prompt: list[int] | str) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": record.call.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra_body,
        }


@dataclass(frozen=True, slots=True)
class _Event:
    error: str
    num_tokens: int  # of the whole answer and of its prompt; 0 = not told
    num_prompt_tokens: int
    has_token: bool
    is_last: bool

    @classmethod
    def parsed(cls, text: str) -> _Event:
        """Raises ValueError for what is no event of a completion."""
        try:
            event = json.loads(text)
            choices, usage = event.get("choices") or (), event.get("usage") or {}
            return cls(
                error=str(event.get("error") or ""),
                num_tokens=int(usage["completion_tokens"]) if usage else 0,
                num_prompt_tokens=int(usage["prompt_tokens"]) if usage else 0,
                has_token=any(_is_token(choice) for choice in choices),
                is_last=any(choice.get("finish_reason") is not None for choice in choices),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__} in {text!r}") from error


async def _read_events(
    record: Record, response: httpx.Response, now_s: Callable[[], float]
) -> None:
    num_chunks, is_whole = 0, False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == _END:
            is_whole = True
            continue
        try:
            event = _Event.parsed(line.removeprefix("data: "))
        except ValueError as error:
            _fail(record, f"an event that cannot be read: {error}")
            return
        if event.error:
            _fail(record, event.error)
            return
        is_whole = is_whole or event.is_last
        num_chunks += event.has_token
        _take(record, event, num_chunks, now_s)
    if not is_whole:
        _fail(record, "an answer that was cut short")
    elif not num_chunks:
        _fail(record, "an answer without a token")
    else:
        record.num_tokens = record.num_tokens or num_chunks
        record.status = Status.DONE


def _take(record: Record, event: _Event, num_chunks: int, now_s: Callable[[], float]) -> None:
    """``num_chunks``: with a token, this one included."""
    record.num_tokens = event.num_tokens or record.num_tokens
    record.num_prompt_tokens = event.num_prompt_tokens or record.num_prompt_tokens
    if event.has_token:
        record.last_s = now_s()
        if num_chunks == 1:
            record.first_s = record.last_s
        elif num_chunks == 2:
            record.second_s = record.last_s


def _fail(record: Record, problem: str) -> None:
    record.status, record.problem = Status.ERROR, problem[:_PROBLEM_CHARS]


def _is_token(choice: Mapping[str, Any]) -> bool:
    """A last chunk may bring no token but the reason why it is the last; a token that is part of a
    character brings no text."""
    return bool(choice.get("text")) or choice.get("finish_reason") is None


def stopwatch() -> Callable[[], float]:
    """Seconds since this call."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start
