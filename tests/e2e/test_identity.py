"""The oracle in short: pair = mixed instance = ``transformers``, token for token, in float32.

The sample model through the whole system; ``benchmarks/identity.py`` is the long form.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from isthmus.common.cluster import Role
from isthmus.common.model_files import locate_model, sample_model_path
from isthmus.gateway.tokenizer import load_tokenizer
from tests.support.oracle import awkward_prompts, reference_tokens
from tests.support.serving import Moved, Serving, serving

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.nixl,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
]

BLOCK, CHUNK, LONGEST = 16, 64, 600
NUM_TOKENS = 12
NUM_EDGES = 12  # one token; around a block, a chunk and two of each
NUM_TEXTS = 6
Tokens = list[list[int]]
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


def choose_prompts() -> Tokens:
    """All the edges, the texts of many scripts, one long prompt, and shared prefixes."""
    tokenizer = load_tokenizer(locate_model("sample"))

    def encode(text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=tokenizer.encode(text, add_special_tokens=False))

    prompts = awkward_prompts(
        SimpleNamespace(encode=encode), 26, block_size=BLOCK, chunk_size=CHUNK, longest=LONGEST
    )
    assert [len(prompt) for prompt in prompts[:NUM_EDGES]] == [
        1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 128, 129,
    ]  # fmt: skip
    texts = NUM_EDGES + NUM_TEXTS
    return [*prompts[:texts], prompts[texts], *prompts[texts + 2 : texts + 6]]


async def outputs(
    running: Serving, prompts: Tokens, *, concurrency: int = 8, **sampling: Any
) -> Tokens:
    """Prompt i is drawn with seed 100 + i, where there is anything to draw."""
    gate = asyncio.Semaphore(concurrency)

    async def one(number: int, prompt: list[int]) -> list[int]:
        async with gate:
            answer = await running.ask(prompt, max_tokens=NUM_TOKENS, seed=100 + number, **sampling)
        assert (answer.error, answer.broken) == (None, "")
        return answer.token_ids

    return await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts)))


class Sides:
    """What a pair and a mixed instance answered."""

    def __init__(self, prompts: Tokens) -> None:
        self.prompts = prompts
        self.pair: Tokens = []
        self.pair_sampled: Tokens = []
        self.pair_sampled_alone: Tokens = []
        self.mixed: Tokens = []
        self.mixed_sampled: Tokens = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    folder = tmp_path_factory.mktemp("identity")
    sides = Sides(choose_prompts())
    engine = {"num_blocks": 300, "max_num_batched_tokens": CHUNK, "num_threads": 2}
    pools: dict[str, Any] = {
        "prefill": {"engine": engine},
        "decode": {"engine": {**engine, "num_threads": 1}},
        "mixed": {"engine": {**engine, "max_num_batched_tokens": 256}},
    }
    async with serving("sample", None, folder / "pair", Role.PREFILL, Role.DECODE, **pools) as pair:
        moved = await Moved.mark(pair, "decode-0")
        sides.pair = await outputs(pair, sides.prompts)
        sides.pair_sampled = await outputs(pair, sides.prompts, **SAMPLED)
        sides.pair_sampled_alone = await outputs(
            pair, sides.prompts[:NUM_EDGES], concurrency=1, **SAMPLED
        )
        assert await moved.by("isthmus_computed_prompt_tokens_total") == 0
        await pair.wait_at_rest()
    async with serving("sample", None, folder / "mixed", Role.MIXED, **pools) as mixed:
        sides.mixed = await outputs(mixed, sides.prompts, concurrency=4)
        sides.mixed_sampled = await outputs(mixed, sides.prompts, concurrency=3, **SAMPLED)
        await mixed.wait_at_rest()
    return sides


async def test_greedy_is_the_same_on_a_pair_and_on_one_instance(sides: Sides) -> None:
    assert all(len(tokens) == NUM_TOKENS for tokens in sides.pair)
    assert sides.pair == sides.mixed


async def test_greedy_is_what_transformers_gives(sides: Sides) -> None:
    """Every second prompt (of each kind some): the reference takes most of this file's time."""
    expected = reference_tokens(sample_model_path(), sides.prompts[::2], NUM_TOKENS)
    assert sides.pair[::2] == expected


async def test_sampling_depends_on_the_seed_alone(sides: Sides) -> None:
    """Not on the placement, the batch, the chunks or what was cached."""
    assert sides.pair_sampled == sides.mixed_sampled
    assert sides.pair_sampled[:NUM_EDGES] == sides.pair_sampled_alone
    assert sides.pair_sampled != sides.pair
