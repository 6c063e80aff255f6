"""Many requests over links that damage, lose and refuse, between blocks of unlike sizes: every
answer is the one that a worker alone gives, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from isthmus.common.metrics import CORRUPT_BLOCKS
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import Answer, GatewayStub, make_request, wait_idle
from tests.support.local_cluster import LocalCluster, local_config

pytestmark = [pytest.mark.asyncio, pytest.mark.fault, pytest.mark.timeout(180)]

NUM_REQUESTS = 60
SCRIPTS = (
    "2:flip, 5:corrupt, 6:refuse, 9:flip, 14:delay=20, 17:flip, 22:fail, 26:flip, 30:corrupt",
    "0:flip, 1:flip, 7:fail, 8:corrupt, 12:duplicate, 15:flip, 21:flip, 28:refuse",
)


def config_of(block_size: int, script: str = "") -> ClusterConfig:
    pool = {
        "engine": {
            "block_size": block_size,
            "num_blocks": 512 // block_size + 1,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 32,
            "watermark": 0.0,
        }
    }
    transfer = {"connector": "fake", "fault_script": script, "quarantine_ms": 200}
    return local_config(prefill=pool, decode=pool, transfer=transfer)


async def test_damage_costs_latency_and_never_a_token() -> None:
    chance = random.Random(11)
    corrupt = CORRUPT_BLOCKS.labels("decode", "decode-0", "fake")
    before = corrupt._value.get()
    async with LocalCluster() as cluster:
        prefills = [
            (await cluster.start(Role.PREFILL, f"prefill-{size}", config_of(size, script))).info
            for size, script in zip((16, 4), SCRIPTS, strict=True)
        ]
        decode = (await cluster.start(Role.DECODE, "decode-0", config_of(8))).info
        assert decode is not None
        async with GatewayStub(decode) as stream:

            async def one(index: int) -> Answer:
                await asyncio.sleep(chance.random())
                prompt = make_prompt(chance.randrange(1, 90), salt=chance.randrange(6))
                request = make_request(prompt, max_tokens=chance.randrange(1, 20))
                answer = await stream.submit(request, *chance.sample(prefills, 2))
                if index % 5 == 0:
                    await asyncio.sleep(chance.random() * 0.3)
                    await stream.abort(answer)
                    return answer
                return await answer.end(90)

            answers = await asyncio.gather(*(one(index) for index in range(NUM_REQUESTS)))
            await wait_idle(decode, *(info for info in prefills if info), timeout_s=30)
            for index, answer in enumerate(answers):
                assert index % 5 == 0 or answer.finished is not None, answer.failed
                if answer.finished is None:
                    continue
                sampling = {"max_tokens": answer.request.sampling.max_tokens}
                alone = make_request(answer.request.token_ids, cache_salt="alone", **sampling)
                assert answer.tokens == (await stream.run(alone, None)).tokens
    assert corrupt._value.get() - before >= 3
