"""Many requests at once over pools that are too small for them, some cancelled, some bad."""

from __future__ import annotations

import asyncio
import random

import pytest

from isthmus.common.cluster import Role
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import Answer, GatewayStub, make_request, wait_idle
from tests.support.local_cluster import LocalCluster, local_config

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

NUM_REQUESTS = 120


async def test_a_storm_is_answered_right_and_leaves_the_pools_as_they_were() -> None:
    chance = random.Random(5)
    # The line for blocks grows with max_num_seqs: here nobody is refused for its length.
    async with LocalCluster(local_config(max_num_seqs=32)) as cluster:
        prefills = [await cluster.start(Role.PREFILL, f"prefill-{index}") for index in range(2)]
        decode = await cluster.start(Role.DECODE, "decode-0")
        mixed = await cluster.start(Role.MIXED, "mixed-0")
        infos = [worker.info for worker in (*prefills, decode, mixed)]
        assert decode.info is not None
        assert mixed.info is not None
        async with GatewayStub(decode.info) as stream, GatewayStub(mixed.info) as oracle:

            async def one(index: int) -> Answer:
                await asyncio.sleep(chance.random())
                prompt = make_prompt(chance.randrange(1, 90), salt=chance.randrange(6))
                if index % 10 == 0:
                    prompt = (*prompt, 9999)
                source = chance.choice([*(worker.info for worker in prefills), None])
                answer = await stream.submit(
                    make_request(prompt, max_tokens=chance.randrange(1, 30)), source
                )
                if index % 3 == 0:
                    await asyncio.sleep(chance.random() * 0.3)
                    await stream.abort(answer)
                    return answer
                return await answer.end(90)

            answers = await asyncio.gather(*(one(index) for index in range(NUM_REQUESTS)))
            await wait_idle(*(info for info in infos if info is not None), timeout_s=30)
            for index, answer in enumerate(answers):
                if index % 10 == 0 and index % 3:
                    assert answer.failed is not None
                    assert answer.failed.error.code == "invalid_request"
                elif index % 3:
                    assert answer.failed is None, answer.failed
                    assert answer.finished is not None
                    assert answer.finished.local_reason in ("none", "mixed_role")
                if answer.finished is not None:
                    sampling = {"max_tokens": answer.request.sampling.max_tokens}
                    alone = await oracle.run(
                        make_request(answer.request.token_ids, **sampling), None
                    )
                    assert answer.tokens == alone.tokens
