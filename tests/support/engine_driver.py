"""Builds requests for engine tests and drives an EngineCore to the end of what it was given."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from isthmus.common.ids import BlockId, RequestId
from isthmus.common.types import FinishReason, Request, SamplingParams, TokenLogprob
from isthmus.engine.core import EngineCore
from isthmus.engine.types import SequenceMode, SequenceUpdate

MAX_STEPS = 2_000


def make_prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """Tokens in [1, 63] without a visible period; unlike salts give unlike prompts."""
    return tuple(1 + (i * i * 7 + i * (3 + salt) + salt * 11) % 63 for i in range(length))


def make_request(
    request_id: str, token_ids: tuple[int, ...], num_resumed_tokens: int = 0, **sampling: object
) -> Request:
    """Greedy, eight tokens, unless ``sampling`` says otherwise."""
    params = replace(SamplingParams(temperature=0.0, max_tokens=8), **sampling)  # type: ignore[arg-type]
    return Request(
        request_id=RequestId(request_id),
        model="tiny",
        token_ids=token_ids,
        sampling=params,
        arrival_ns=0,
        deadline_ns=2**62,
        num_resumed_tokens=num_resumed_tokens,
    )


@dataclass
class Outcome:
    """What one request got, over all its updates."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    updates: list[SequenceUpdate] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.updates[-1].finish_reason if self.updates else None

    @property
    def num_cached_tokens(self) -> int:
        return self.updates[-1].num_cached_tokens

    def add(self, update: SequenceUpdate) -> None:
        self.token_ids.extend(update.token_ids)
        self.logprobs.extend(update.logprobs)
        self.prompt_logprobs.extend(update.prompt_logprobs)
        self.updates.append(update)


class Driver:
    """Steps an engine and sorts its updates by request, checking integrity after every step."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outcomes: dict[str, Outcome] = {}
        self.num_preempted = 0

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        output = self.core.step()
        self.core.check_integrity()
        if output is None:
            return False
        self.num_preempted += output.num_preempted
        for update in output.updates:
            self.outcomes.setdefault(update.request_id, Outcome()).add(update)
        return True

    def run(self) -> dict[str, Outcome]:
        """Steps until there is nothing to do."""
        for _ in range(MAX_STEPS):
            if not self.step():
                return self.outcomes
        raise AssertionError(f"still busy after {MAX_STEPS} steps")

    def settle(self) -> None:
        """Lands what is in flight, of which nobody may hear any more."""
        while (output := self.core.step()) is not None:
            self.core.check_integrity()
            assert output.updates == ()


def generate(core: EngineCore, *requests: Request) -> list[Outcome]:
    """Runs FULL requests together to their end."""
    for request in requests:
        core.add(request)
    outcomes = Driver(core).run()
    return [outcomes[request.request_id] for request in requests]


def prefill(core: EngineCore, request: Request) -> Outcome:
    """Runs a PREFILL_ONLY request until it is held or over."""
    core.add(request, SequenceMode.PREFILL_ONLY)
    return Driver(core).run()[request.request_id]


def copy_blocks(
    source: EngineCore,
    source_ids: tuple[BlockId, ...],
    target: EngineCore,
    target_ids: tuple[BlockId, ...],
) -> None:
    """Moves KV between two engines' stores, as a transfer does."""
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        target.kv_store.tensor[target_id] = source.kv_store.tensor[source_id]
