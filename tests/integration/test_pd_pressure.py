"""A prefill pool that holds three prompts, and many that want it: nothing is evicted or given on
while it is being sent, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from isthmus.common.config import ClusterConfig
from tests.support.engine_driver import make_prompt
from tests.support.local_cluster import local_config
from tests.support.worker_pair import local_pair

pytestmark = [pytest.mark.asyncio, pytest.mark.fault, pytest.mark.timeout(180)]

NUM_REQUESTS = 36
LENGTH = 60


def config_of(num_blocks: int) -> ClusterConfig:
    """Every third write takes many looks to end, with the blocks that it reads."""
    config = local_config(
        max_num_seqs=NUM_REQUESTS,
        transfer={"connector": "fake", "fault_script": "0%3:delay=25", "quarantine_ms": 200},
    )
    engine = config.prefill.engine.model_copy(update={"num_blocks": num_blocks})
    pool = config.prefill.model_copy(update={"engine": engine})
    return config.model_copy(update={"prefill": pool, "decode": pool})


def prompt_of(index: int) -> tuple[int, ...]:
    """Some begin alike, so that hits, evictions and sends are of the same blocks."""
    return (*make_prompt(20, salt=index % 4), *make_prompt(LENGTH - 20, salt=index))


async def test_blocks_that_are_sent_are_neither_evicted_nor_given_on() -> None:
    small, roomy = config_of(3 * LENGTH // 4 + 4), config_of(NUM_REQUESTS * 20 + 1)
    async with local_pair(small, roomy, timeout_ms=120_000) as pair:
        # Every fourth ends with its first token, while its blocks are on their way.
        limits = [1 if index % 4 == 3 else 5 for index in range(NUM_REQUESTS)]
        answers = await asyncio.gather(
            *(pair.run(prompt_of(i), max_tokens=limit) for i, limit in enumerate(limits))
        )
        for index, (answer, limit) in enumerate(zip(answers, limits, strict=True)):
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "none"
            assert answer.tokens == await pair.alone(prompt_of(index), max_tokens=limit), index
        await pair.wait_idle()
