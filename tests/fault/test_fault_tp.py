"""A rank of an instance dies: the whole instance comes back with a new epoch, and nothing is left.

Which rank it was makes no difference to a client. Its stream goes on, on another instance or on the
same one once it is back.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.controlplane.state_file import process_start
from tests.support.engine_driver import make_prompt
from tests.support.poll import poll_until
from tests.support.serving import Moved, Oracle, Serving, serving

pytestmark = [pytest.mark.asyncio, pytest.mark.fault, pytest.mark.timeout(300)]

ENGINE = {"num_blocks": 300, "max_num_batched_tokens": 16, "max_num_seqs": 8, "tp_size": 2}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


async def wait_gone(info: InstanceInfo) -> None:
    await poll_until(lambda: all(process_start(pid) is None for pid in info.rank_pids), 60.0)


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
async def test_a_dead_rank_restarts_the_instance_and_its_streams_go_on(
    model: Path, oracle: Oracle, tmp_path: Path, rank: int
) -> None:
    """With nobody else to go to, requests wait for the instance to come back."""
    sections = {"mixed": {"engine": ENGINE}, "gateway": {"instance_wait_ms": 60_000}}
    async with serving(model, oracle, tmp_path, Role.MIXED, **sections) as running:
        async with running.supervised():
            after = await lose_a_rank(running, rank)
        # A stop ends every rank, too.
        running.workers["mixed-0"].signal(signal.SIGTERM)
        await wait_gone(after)
        assert await running.workers["mixed-0"].wait() == 0


async def lose_a_rank(running: Serving, rank: int) -> InstanceInfo:
    moved = await Moved.mark(running)
    before = running.info("mixed-0")
    assert (before.kv_layout.tp_size, len(before.rank_pids)) == (2, 2)
    assert before.rank_pids[0] == before.pid
    answers = [
        running.submit(make_prompt(60 + n, n), max_tokens=300, **sampling)
        for n, sampling in enumerate(({}, SEEDED))
    ]
    for answer in answers:
        await answer.until(5)
    os.kill(before.rank_pids[rank], signal.SIGKILL)
    await wait_gone(before)
    assert not any(answer.has_ended for answer in answers)
    await running.wait_restarts(1)
    after = running.info("mixed-0")
    assert after.epoch == before.epoch + 1
    assert not set(after.rank_pids) & set(before.rank_pids)
    for answer in answers:
        running.check(await answer.end())
    assert await moved.by("isthmus_retries_total", reason="resume") == len(answers)
    await running.wait_at_rest()
    return after
