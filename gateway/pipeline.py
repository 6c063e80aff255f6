"""From a checked body to a plan: template, tokens, lengths, hashes, sampling.

Short inputs are tokenised in the event loop (a thread hop costs more than the work); long ones in a
small thread pool, so that one long prompt does not hold up the streams of others.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel

from isthmus.common.clock import NS_PER_MS, Clock
from isthmus.common.config import GatewayConfig
from isthmus.common.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedParameterError,
)
from isthmus.common.timeline import Event, Timeline
from isthmus.common.types import SamplingParams, Slo
from isthmus.gateway.chat_template import ChatTemplate, JsonValue
from isthmus.gateway.limits import Identity
from isthmus.gateway.plan import GenerationPlan, PreparedPrompt
from isthmus.gateway.router_client import RouterClient
from isthmus.gateway.schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    Prompt,
    parse_body,
)
from isthmus.gateway.tokenizer import TextTokenizer

LONG_TEXT = 4_000
"""Characters (or given token ids) from which on the work goes to a thread."""
LONG_BODY = 2**18
"""Bytes of a body from which on it is parsed in a thread."""
LEGACY_MAX_TOKENS = 16
"""OpenAI's default for plain completions."""
MAX_SEQUENCES = 256
"""Prompts × n of one request."""
BodyT = TypeVar("BodyT", bound=BaseModel)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request at the door: its id, whose it is, its class of service and when its body had
    been read."""

    request_id: str
    identity: Identity
    slo: Slo
    timeline: Timeline
    arrived_ns: int
    session: str = ""  # as a header named it


class Pipeline:
    """Owns the thread pool. ``default_name`` is the model's name while no instance is known."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: TextTokenizer,
        router: RouterClient,
        clock: Clock,
        served_name: str,
        default_name: str,
    ) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._router = router
        self._clock = clock
        self._served_name = served_name
        self._default_name = default_name
        template = tokenizer.chat_template
        self._template = ChatTemplate(template, tokenizer.special_tokens) if template else None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")

    @property
    def model_name(self) -> str:
        return self._served_name or self._router.model() or self._default_name

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.model_name:
            message = f"the model {model!r} is not served here; there is {self.model_name!r}"
            raise ModelNotFoundError(message, param="model", stage="validate")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def parse(self, model: type[BodyT], raw: bytes) -> BodyT:
        """Raises InvalidRequestError naming the first bad parameter."""
        return await self._run(lambda: parse_body(model, raw), len(raw), LONG_BODY)

    async def plan_chat(self, body: ChatBody, arrival: Arrival) -> GenerationPlan:
        """Raises InvalidRequestError and its kin; nothing has been sent anywhere yet."""
        self._router.require_decode()
        salt = arrival.identity.cache_salt(body.cache_salt)

        def work() -> tuple[PreparedPrompt, ...]:
            text = self.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
            ids = self._encode(text, add_special_tokens=False)
            default = self._config.default_max_tokens
            return (self._prepare(text, ids, body.token_limit, default, salt),)

        size = sum(len(message.content or "") for message in body.messages)
        prompts = await self._run(work, size)
        sampling = self._sampling(body, body.num_logprobs, prompts[0].max_tokens)
        return self._plan(body, prompts, sampling, arrival, salt)

    async def plan_completion(self, body: CompletionBody, arrival: Arrival) -> GenerationPlan:
        """Raises InvalidRequestError and its kin; nothing has been sent anywhere yet."""
        self._router.require_decode()
        salt = arrival.identity.cache_salt(body.cache_salt)
        if len(body.prompt) * (body.n or 1) > MAX_SEQUENCES:
            message = f"prompts × n may be at most {MAX_SEQUENCES}"
            raise InvalidRequestError(message, param="prompt", stage="validate")
        default = self._config.default_max_tokens or LEGACY_MAX_TOKENS
        asked = 1 if body.max_tokens == 0 else body.max_tokens

        def work() -> tuple[PreparedPrompt, ...]:
            return tuple(
                self._prepare(*self._encode_prompt(prompt, body.echo), asked, default, salt)
                for prompt in body.prompt
            )

        prompts = await self._run(work, sum(len(prompt) for prompt in body.prompt))
        sampling = self._sampling(body, body.logprobs, prompts[0].max_tokens)
        if body.echo and body.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        plan = self._plan(body, prompts, sampling, arrival, salt)
        return replace(plan, is_echo=bool(body.echo), has_output=body.max_tokens != 0)

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        variables: Mapping[str, JsonValue] | None,
    ) -> str:
        if self._template is None:
            message = "the model has no chat template: use /v1/completions"
            raise UnsupportedParameterError(message, param="messages", stage="template")
        return self._template.render(
            [message.for_template() for message in messages],
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    async def tokenise(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises ContextLengthError for a text that the model could not hold."""

        def work() -> list[int]:
            return self._encode(text, add_special_tokens=add_special_tokens)

        return await self._run(work, len(text))

    async def detokenise(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Raises InvalidRequestError for an id outside the vocabulary."""

        def work() -> str:
            self.tokenizer.check_ids(token_ids, "tokens")
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return await self._run(work, len(token_ids))

    # --- inside ---------------------------------------------------------------------------------
    async def _run(self, work: Callable[[], _T], size: int, limit: int = LONG_TEXT) -> _T:
        if size < limit:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Looks at the length first: megabytes take seconds, and are refused all the same."""
        limit = self._router.max_model_len()
        longest = self.tokenizer.longest_token
        if limit is not None and longest and len(text) > limit * longest:
            message = (
                f"the model's context is {limit} tokens; the prompt has {len(text)} characters, "
                f"which are at least {-(-len(text) // longest)} tokens"
            )
            raise ContextLengthError(message, stage="tokenise")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _encode_prompt(self, prompt: Prompt, echo: bool | None) -> tuple[str, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self._encode(prompt, add_special_tokens=True)
        self.tokenizer.check_ids(prompt, "prompt")
        return self.tokenizer.decode_finished(prompt) if echo else "", prompt

    def _prepare(
        self, text: str, ids: Sequence[int], asked: int | None, default: int, salt: str
    ) -> PreparedPrompt:
        if not ids:
            raise InvalidRequestError("the prompt is empty", param="prompt", stage="tokenise")
        max_tokens = self._output_limit(len(ids), asked, default)
        chains = self._router.hash_prompt(ids, salt)
        return PreparedPrompt(text, tuple(ids), chains, max_tokens)

    def _output_limit(self, num_prompt: int, asked: int | None, default: int) -> int:
        limit = self._router.max_model_len()
        if limit is None:  # the last instance has just gone: the router will say so
            return asked or default or LEGACY_MAX_TOKENS
        room = limit - num_prompt
        if room < 1 or (asked is not None and asked > room):
            wanted = "" if asked is None else f" and {asked} for the completion were requested"
            message = f"the model's context is {limit} tokens; the prompt has {num_prompt}{wanted}"
            raise ContextLengthError(
                message, param="max_tokens" if asked else None, stage="validate"
            )
        return asked or min(default or room, room)

    def _plan(
        self,
        body: GenerationBody,
        prompts: tuple[PreparedPrompt, ...],
        sampling: SamplingParams,
        arrival: Arrival,
        salt: str,
    ) -> GenerationPlan:
        if sampling.min_tokens > min(prompt.max_tokens for prompt in prompts):
            message = "min_tokens is greater than the number of tokens allowed"
            raise InvalidRequestError(message, param="min_tokens", stage="validate")
        arrival.timeline.mark(Event.TOKENISED, self._clock.now_ns())
        return GenerationPlan(
            request_id=arrival.request_id,
            model=self.model_name,
            prompts=prompts,
            num_choices=body.n or 1,
            sampling=sampling,
            stop_strings=tuple(stop for stop in body.stop or () if isinstance(stop, str)),
            arrival_ns=arrival.arrived_ns,
            deadline_ns=arrival.arrived_ns + self._config.request_timeout_ms * NS_PER_MS,
            slo=arrival.slo,
            tenant=arrival.identity.tenant,
            tenant_label=arrival.identity.label,
            cache_salt=salt,
            session=arrival.session or body.prompt_cache_key or "",
            is_streamed=bool(body.stream),
        )

    def _sampling(
        self, body: GenerationBody, logprobs: int | None, max_tokens: int
    ) -> SamplingParams:
        stops = [stop for stop in body.stop or () if isinstance(stop, int)]
        stops += body.stop_token_ids or ()
        self.tokenizer.check_ids(stops, "stop_token_ids")
        if not body.ignore_eos:
            stops += self.tokenizer.eos_token_ids
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            min_p=body.min_p or 0.0,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=tuple(dict.fromkeys(stops)),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=self._logit_bias(body.logit_bias or {}),
            seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
            logprobs=logprobs,
        )

    def _logit_bias(self, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
        self.tokenizer.check_ids([int(name) for name in bias], "logit_bias")
        return tuple((int(name), value) for name, value in bias.items())
