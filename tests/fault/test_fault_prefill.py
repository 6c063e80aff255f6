"""A prefill instance dies, stops or is gone for good: the client sees nothing but latency."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from isthmus.common.cluster import Role
from tests.support.engine_driver import make_prompt
from tests.support.serving import Moved, Oracle, Serving, serving

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.nixl,
    pytest.mark.fault,
    pytest.mark.timeout(180),
]

LONG = 1_800  # tokens: more than a hundred chunks
PAIR = (Role.PREFILL, Role.DECODE)
ATTEMPTS = 4  # at a fault in mid-stream: on a machine that starves all may be over before it
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}


async def check_serves_remotely(running: Serving, salt: int) -> None:
    """New prompts are computed on the prefill instance again, into clean blocks."""
    moved = await Moved.mark(running)
    answers = [running.submit(make_prompt(150 + 40 * n, salt + n), max_tokens=6) for n in range(4)]
    for answer in answers:
        running.check(await answer.end())
        assert answer.headers["x-isthmus-prefill"] == "prefill-0"
    assert await moved.by("isthmus_local_prefill_total") == 0
    await running.wait_at_rest()


async def test_killed_before_the_last_chunk(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async with serving(model, oracle, tmp_path, *PAIR) as running:
        moved = await Moved.mark(running)
        answers = [
            running.submit(make_prompt(LONG, 1), max_tokens=12),
            running.submit(make_prompt(LONG, 2), max_tokens=12, **SEEDED),
        ]
        await running.busy("prefill-0")
        await running.kill("prefill-0")
        for answer in answers:
            running.check(await answer.end())
        assert await moved.by("isthmus_local_prefill_total", reason="prefill_failed") == 2
        assert await moved.by("isthmus_requests_total", outcome="good") == 2
        # A dead writer is proven dead: nobody waits for the request's deadline.
        await running.wait_at_rest()
        assert (await running.restart("prefill-0")).epoch == 2
        await check_serves_remotely(running, salt=3)


async def test_killed_after_completion_nobody_notices(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with serving(model, oracle, tmp_path, *PAIR) as running:
        moved = await Moved.mark(running)
        for salt in range(ATTEMPTS):
            answer = running.submit(make_prompt(200, salt), max_tokens=500)
            await answer.until(3)  # decode has the KV: it computes
            await running.kill("prefill-0")
            is_in_time = not answer.has_ended
            running.check(await answer.end())
            if is_in_time:
                break
            await running.restart("prefill-0")
        else:
            raise AssertionError("every answer had ended before its prefill instance")
        assert answer.headers["x-isthmus-prefill"] == "prefill-0"
        assert await moved.by("isthmus_local_prefill_total") == 0
        assert await moved.by("isthmus_retries_total") == 0
        await running.wait_at_rest()


async def test_with_the_prefill_pool_gone_decode_computes_prompts_itself(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with serving(model, oracle, tmp_path, *PAIR) as running:
        moved = await Moved.mark(running)
        await running.kill("prefill-0")
        await running.wait_serving()
        answers = [running.submit(make_prompt(90, n), max_tokens=8, **SEEDED) for n in range(4)]
        for answer in answers:
            running.check(await answer.end())
            assert "x-isthmus-prefill" not in answer.headers
            assert answer.headers["x-isthmus-local-prefill"] == "no_prefill_instance"
        assert await moved.by("isthmus_local_prefill_total", reason="no_prefill_instance") == 4
        await running.wait_at_rest()
        await running.restart("prefill-0")
        await check_serves_remotely(running, salt=10)


async def test_a_prefill_instance_that_stops_is_not_waited_for(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """The stopped process holds its connections: the transfer's patience tells when it was
    stopped with blocks on their way, else the keepalive of the stream does."""
    transfer = {"deadline_ms": 2_500, "quarantine_ms": 300}
    async with serving(model, oracle, tmp_path, *PAIR, transfer=transfer) as running:
        moved = await Moved.mark(running)
        answer = running.submit(make_prompt(LONG, 1), max_tokens=12)
        await running.busy("prefill-0")
        prefill = running.workers["prefill-0"]
        prefill.signal(signal.SIGSTOP)
        try:
            running.check(await answer.end())
        finally:
            prefill.signal(signal.SIGCONT)
        assert await moved.by("isthmus_local_prefill_total", reason="prefill_failed") == 1
        decode = await running.metrics("decode-0")
        ends = ("expired", "failed")
        ended = [
            decode.get("isthmus_kv_transfers_total", side="receive", state=end) for end in ends
        ]
        assert sum(ended) == 1
        # Awake again it ends what it had begun, and nothing of that lands in anybody's blocks. The
        # short patience may end a good transfer on a starving machine: one prompt has to arrive.
        await running.wait_serving()
        for salt in range(20, 30):
            moved = await Moved.mark(running)
            again = await running.ask(make_prompt(150, salt), max_tokens=6)
            running.check(again)
            assert again.headers["x-isthmus-prefill"] == "prefill-0"
            if await moved.by("isthmus_local_prefill_total") == 0:
                break
        else:
            raise AssertionError("no prompt was computed on the prefill instance again")
        await running.wait_at_rest()
