"""Failure policy by class of service, and what users of such systems have seen go wrong: pools that
only empty when something is scheduled, bursts of cancels, a prefill step that raises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.common.config import ClusterConfig
from isthmus.common.metrics import TRANSFERS_HOPELESS
from isthmus.common.types import Remedy, Slo
from isthmus.kvtransfer import link
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import make_request, wait_idle
from tests.support.local_cluster import local_config
from tests.support.poll import poll_until
from tests.support.worker_pair import (
    LONG_PROMPT,
    PROMPT,
    assert_fell_back,
    faulty,
    local_pair,
    remedies,
    run_with_alternate,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.fault, pytest.mark.timeout(120)]


# --- failure policy ------------------------------------------------------------------------------


async def test_a_class_chooses_what_a_failure_means_to_it() -> None:
    """The instance is configured for another attempt; one class wants to fail, one to go on."""
    failing, patient = Slo("batch", on_failure=Remedy.FAIL), Slo("x", on_failure=Remedy.RECOMPUTE)
    async with local_pair(faulty("0+:refuse")) as pair:
        before = remedies("transfer_failed", "fail"), remedies("transfer_failed", "recompute")
        request = replace(make_request(PROMPT, max_tokens=9), slo=failing)
        failed = await pair.stream.run(request, pair.prefill_info)
        assert failed.failed is not None
        assert failed.failed.error.code == "prefill_failed"
        request = replace(make_request(PROMPT, max_tokens=9), slo=patient)
        served = await pair.stream.run(request, pair.prefill_info)
        assert_fell_back(served, await pair.local(max_tokens=9))
        after = remedies("transfer_failed", "fail"), remedies("transfer_failed", "recompute")
        assert after[0]["fail"] == before[0]["fail"] + 1
        assert after[1]["recompute"] == before[1]["recompute"] + 1
        await pair.wait_idle()


async def test_the_timeline_is_of_the_attempt_that_counted() -> None:
    """The first attempt fails with its first chunk, before there is a token; nothing of its times
    may stay."""
    async with local_pair(faulty("0+:refuse"), prompt=LONG_PROMPT) as pair:
        answer, alternate = await run_with_alternate(pair, "")
        assert answer.finished is not None
        times = answer.timeline
        order = ["admitted", "prefill_queued", "scheduled", "prefilled", "first_token", "kv_ready"]
        assert [times[event] for event in order] == sorted(times[event] for event in order)
        assert times["second_token"] >= times["kv_ready"]
        await pair.wait_idle()
        await wait_idle(alternate)


# --- links ---------------------------------------------------------------------------------------


async def test_a_transfer_that_cannot_be_in_time_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link is found to be too slow for the next prompt: no step is spent on it elsewhere."""
    async with local_pair() as pair:
        first = await pair.run(max_tokens=4)
        assert first.finished is not None
        assert first.finished.local_reason == "none"
        await pair.wait_idle()
        hopeless = TRANSFERS_HOPELESS.labels("prefill", "prefill-0", "local")
        before, steps = hopeless._value.get(), len(pair.prefill.model.forward_sizes)
        monkeypatch.setattr(link.LinkEstimate, "is_too_slow", lambda *_: True)
        prompt = make_prompt(50, salt=3)
        answer = await pair.stream.run(make_request(prompt, max_tokens=4), pair.prefill_info)
        monkeypatch.undo()
        alone = make_request(prompt, max_tokens=4, cache_salt="alone")
        assert_fell_back(answer, await pair.stream.run(alone, None))
        assert hopeless._value.get() == before + 1
        assert len(pair.prefill.model.forward_sizes) == steps
        await pair.wait_idle()


# --- pools ---------------------------------------------------------------------------------------


async def test_a_pool_full_of_stuck_transfers_empties_by_itself() -> None:
    """Four prompts hold sixty of the sixty-four blocks and a fifth waits: nothing can be scheduled
    until the stuck ones are given up, which nothing but their own timers does."""
    async with local_pair(faulty("0+:hang", deadline_ms=700)) as pair:
        prompts = [make_prompt(60, salt) for salt in range(5)]
        answers = [
            await pair.stream.submit(make_request(prompt, max_tokens=2), pair.prefill_info)
            for prompt in prompts
        ]
        for answer in answers:
            await answer.end()
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "prefill_failed"
        engine = pair.prefill.engine
        assert engine is not None
        await poll_until(lambda: engine.load().free_blocks == engine.load().num_blocks, 20)
        engine.check_integrity()
        await wait_idle(pair.decode_info)


async def test_after_a_burst_of_cancels_requests_are_served() -> None:
    async with local_pair(_roomy()) as pair:
        for _ in range(3):
            pair.prefill.model.gate.clear()
            answers = [
                await pair.stream.submit(
                    make_request(make_prompt(90, salt), max_tokens=4), pair.prefill_info
                )
                for salt in range(20)
            ]
            await poll_until(lambda: pair.prefill.model.num_held > 0, 20)
            for answer in answers:
                await pair.stream.abort(answer)
            pair.prefill.model.gate.set()
            await pair.wait_idle()
        good = await pair.run(max_tokens=6)
        assert good.finished is not None
        assert good.finished.local_reason == "none"
        await pair.wait_idle()


async def test_a_step_that_raises_before_the_handoff_costs_only_latency() -> None:
    async with local_pair() as pair:
        pair.prefill.model.fail_next = 1
        answer = await pair.run(max_tokens=6)
        assert_fell_back(answer, await pair.local(max_tokens=6))
        good = await pair.stream.run(
            make_request(make_prompt(40, 2), max_tokens=3), pair.prefill_info
        )
        assert good.finished is not None
        assert good.finished.local_reason == "none"  # the instance is well
        await pair.wait_idle()


def _roomy() -> ClusterConfig:
    """Everybody may wait: a line for blocks as long as the burst."""
    return local_config(max_num_seqs=32)
