"""A decode instance dies or stops: retried before the first token, resumed behind it, or told.

A stopped process holds its connections; the gateway notices when pings go unanswered, within about
seven seconds.
"""

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

LONG = 1_800
DECODES = ("decode-0", "decode-1")
ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE)
PATIENT = {"stale_load_ms": 600_000}  # no silence is taken for a broken stream
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
ATTEMPTS = 4  # at a fault in mid-stream: on a machine that starves all may be over before it
SIGNALS = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])


async def strike(running: Serving, instance_id: str, how: signal.Signals) -> None:
    worker = running.workers[instance_id]
    worker.signal(how)
    if how is signal.SIGKILL:
        await worker.wait()


async def revive(running: Serving, instance_id: str, how: signal.Signals) -> None:
    if how is signal.SIGKILL:
        await running.restart(instance_id)
    else:
        running.workers[instance_id].signal(signal.SIGCONT)
        await running.wait_serving()


@SIGNALS
async def test_lost_before_the_first_token_is_retried_elsewhere(
    model: Path, oracle: Oracle, tmp_path: Path, how: signal.Signals
) -> None:
    async with serving(model, oracle, tmp_path, *ROLES, router=PATIENT) as running:
        for number, _ in enumerate(DECODES):  # links that are known need no answer to begin
            running.check(await running.ask(make_prompt(100, 3 + number), max_tokens=8))
        moved = await Moved.mark(running)
        # Nothing is computed meanwhile, however long this machine takes to strike.
        prefill = running.workers["prefill-0"]
        prefill.signal(signal.SIGSTOP)
        answer = running.submit(make_prompt(LONG, 1), max_tokens=8, **SEEDED)
        lost = await running.busy(*DECODES)
        await strike(running, lost, how)
        assert not answer.token_ids
        prefill.signal(signal.SIGCONT)
        running.check(await answer.end())
        assert {answer.headers["x-isthmus-decode"], lost} == set(DECODES)
        assert await moved.by("isthmus_retries_total", reason="retry") == 1
        assert await moved.by("isthmus_retries_total", reason="resume") == 0
        assert await moved.by("isthmus_local_prefill_total") == 0
        await revive(running, lost, how)
        await running.wait_at_rest()
        running.check(await running.ask(make_prompt(100, 2), max_tokens=8))


@SIGNALS
async def test_lost_in_mid_stream_is_resumed_elsewhere(
    model: Path, oracle: Oracle, tmp_path: Path, how: signal.Signals
) -> None:
    async with serving(model, oracle, tmp_path, *ROLES) as running:
        for _ in range(ATTEMPTS):
            moved = await Moved.mark(running)
            answers = [
                running.submit(make_prompt(60 + n, n), max_tokens=400, **sampling)
                for n, sampling in enumerate(({}, SEEDED, {}, SEEDED))
            ]
            for answer in answers:
                await answer.until(5)
            lost = answers[0].headers["x-isthmus-decode"]
            num_lost = sum(answer.headers["x-isthmus-decode"] == lost for answer in answers)
            await strike(running, lost, how)
            is_in_time = not any(answer.has_ended for answer in answers)
            for answer in answers:
                running.check(await answer.end())
            if is_in_time:
                break
            await revive(running, lost, how)
        else:
            raise AssertionError("some answer had always ended before its instance")
        assert await moved.by("isthmus_retries_total", reason="resume") == num_lost == 2
        assert await moved.by("isthmus_requests_total", outcome="good") == len(answers)
        await revive(running, lost, how)
        await running.wait_at_rest()
        for _ in DECODES:
            running.check(await running.ask(make_prompt(100, 2), max_tokens=8))


async def test_a_stream_survives_every_instance_it_has_been_on(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """An instance that has restarted is a new one: the stream may come back to it."""
    async with serving(model, oracle, tmp_path, *ROLES) as running:
        for _ in range(ATTEMPTS):
            moved = await Moved.mark(running)
            answer = running.submit(make_prompt(100, 1), max_tokens=1_500, **SEEDED)
            await answer.until(5)
            first = answer.headers["x-isthmus-decode"]
            (second,) = set(DECODES) - {first}
            await running.kill(first)
            if not answer.has_ended:
                await answer.until(len(answer.token_ids) + 5)  # resumed on the second
            await running.restart(first)
            is_in_time = not answer.has_ended
            if is_in_time:
                await running.kill(second)
            running.check(await answer.end())
            if is_in_time:
                break
        else:
            raise AssertionError("the stream was always faster than a restart")
        assert await moved.by("isthmus_retries_total", reason="resume") == 2
        await running.restart(second)
        await running.wait_at_rest()


@SIGNALS
async def test_a_loss_may_be_configured_to_end_the_stream_with_an_error(
    model: Path, oracle: Oracle, tmp_path: Path, how: signal.Signals
) -> None:
    async with serving(
        model, oracle, tmp_path, *ROLES, gateway={"on_decode_loss": "error"}
    ) as running:
        moved = await Moved.mark(running)
        answer = running.submit(make_prompt(60, 1), max_tokens=1_000)
        await answer.until(5)
        lost = answer.headers["x-isthmus-decode"]
        await strike(running, lost, how)
        await answer.end()
        assert answer.error is not None
        assert answer.error["code"] == "instance_lost"
        assert lost in answer.error["message"]
        assert (answer.finish_reason, answer.broken, answer.is_done) == (None, "", True)
        expected = running.expected(answer)
        assert answer.token_ids == expected[: len(answer.token_ids)]
        assert await moved.by("isthmus_retries_total") == 0
        running.check(await running.ask(make_prompt(60, 2), max_tokens=8))
        await revive(running, lost, how)
        await running.wait_at_rest()


@SIGNALS
async def test_the_only_decode_instance_lost_ends_streams_with_an_error(
    model: Path, oracle: Oracle, tmp_path: Path, how: signal.Signals
) -> None:
    pair = (Role.PREFILL, Role.DECODE)
    async with serving(model, oracle, tmp_path, *pair, gateway={"instance_wait_ms": 0}) as running:
        answer = running.submit(make_prompt(60, 1), max_tokens=1_000)
        early = running.submit(make_prompt(LONG, 2), max_tokens=8)
        await answer.until(5)
        await strike(running, "decode-0", how)
        await answer.end()
        await early.end()
        for ended in (answer, early):
            assert ended.error is not None, ended.broken
            assert ended.error["code"] == "instance_lost"
            assert ended.finish_reason is None
        refused = await running.ask(make_prompt(60, 3), max_tokens=4)
        assert refused.status == 503
        assert refused.headers["retry-after"]
        await revive(running, "decode-0", how)
        await running.wait_at_rest()
        running.check(await running.ask(make_prompt(60, 1), max_tokens=8))
