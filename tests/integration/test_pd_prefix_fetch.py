"""Both ways: what the decode instance has of a prompt, the prefill instance need not compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from isthmus.common import metrics
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import (
    Answer,
    GatewayStub,
    check_integrity,
    make_request,
    wait_idle,
)
from tests.support.local_cluster import LocalCluster, LocalWorker, local_config
from tests.support.poll import poll_until

pytestmark = pytest.mark.asyncio
BLOCK = 4
ANSWER = 9  # tokens of a turn's answer
QUESTION = 7


@dataclass
class Trio:
    prefill: LocalWorker
    decode: LocalWorker
    mixed: LocalWorker
    pair_stream: GatewayStub
    mixed_stream: GatewayStub

    async def ask(self, tokens: tuple[int, ...], **sampling: object) -> Answer:
        """From the pair; the answer is held against the mixed worker's."""
        request = make_request(tokens, **{"max_tokens": ANSWER, **sampling})
        answer = await self.pair_stream.run(request, self.prefill.info)
        alone = await self.mixed_stream.run(
            make_request(tokens, **{"max_tokens": ANSWER, **sampling}), None
        )
        assert answer.failed is None, answer.failed
        assert answer.tokens == alone.tokens
        return answer

    def computed(self) -> int:
        """Prompt tokens that the prefill instance has computed so far."""
        assert self.prefill.engine is not None
        return self.prefill.engine.load().totals.prefill_tokens


@asynccontextmanager
async def start_trio(config: ClusterConfig) -> AsyncIterator[Trio]:
    async with LocalCluster(config) as cluster:
        workers = [
            await cluster.start(role, f"{role.value}-0")
            for role in (Role.PREFILL, Role.DECODE, Role.MIXED)
        ]
        infos = [worker.info for worker in workers]
        assert infos[1] is not None
        assert infos[2] is not None
        async with GatewayStub(infos[1]) as pair, GatewayStub(infos[2]) as mixed:
            yield Trio(*workers, pair, mixed)
            await wait_idle(*infos)
        for worker in workers:
            assert worker.engine is not None
            worker.engine.check_integrity()
            assert worker.engine.load().quarantined_blocks == 0


def fetching(least: int = BLOCK, **transfer: object) -> ClusterConfig:
    settings = {
        "connector": "local",
        "quarantine_ms": 200,
        "fetch_min_tokens": least,
        "fetch_timeout_ms": 30_000,
        **transfer,
    }
    return local_config(transfer=settings)


def given_up(worker: LocalWorker) -> float:
    labels = ("prefill", worker.instance_id, "given_up")
    return metrics.PREFIX_FETCHES.labels(*labels)._value.get()


async def test_a_chat_of_ten_turns_computes_and_moves_what_is_new() -> None:
    async with start_trio(fetching()) as trio:
        talk: tuple[int, ...] = make_prompt(QUESTION)
        for turn in range(10):
            before = trio.computed()
            answer = await trio.ask(talk)
            computed = trio.computed() - before
            assert answer.finished is not None
            block_bytes = trio.decode.engine.kv_layout.block_bytes  # type: ignore[union-attr]
            # New is the question, and what did not fill a block of what went before.
            assert computed <= QUESTION + BLOCK, f"turn {turn}: {computed} computed"
            num_new_blocks = (QUESTION + BLOCK) // BLOCK + 1
            assert answer.finished.transferred_bytes <= num_new_blocks * block_bytes
            talk = (*talk, *answer.tokens, *make_prompt(QUESTION, salt=turn + 1))


async def test_without_fetching_the_last_answer_is_computed_again() -> None:
    async with start_trio(fetching(least=0)) as trio:
        first = await trio.ask(make_prompt(QUESTION), max_tokens=40)
        talk = (*make_prompt(QUESTION), *first.tokens, *make_prompt(QUESTION, salt=1))
        before = trio.computed()
        await trio.ask(talk)
        assert trio.computed() - before >= len(first.tokens)


async def test_little_is_not_worth_asking_for() -> None:
    async with start_trio(fetching(least=64)) as trio:
        first = await trio.ask(make_prompt(QUESTION))
        before = trio.computed()
        await trio.ask((*make_prompt(QUESTION), *first.tokens, *make_prompt(3, salt=1)))
        assert trio.computed() - before >= len(first.tokens)


@pytest.mark.parametrize("script", ["0+:fail", "0+:drop", "0+:refuse", "0+:hang"])
async def test_a_fetch_that_fails_costs_time_only(script: str) -> None:
    """Writes of the decode instance, whose only ones are what it gives."""
    patience = {"connector": "fake", "fetch_timeout_ms": 500}
    async with LocalCluster(fetching(**patience)) as cluster:
        prefill = await cluster.start(Role.PREFILL, "prefill-0")
        decode = await cluster.start(
            Role.DECODE, "decode-0", fetching(**patience, fault_script=script)
        )
        mixed = await cluster.start(Role.MIXED, "mixed-0")
        assert decode.info is not None
        assert mixed.info is not None
        async with GatewayStub(decode.info) as stream, GatewayStub(mixed.info) as alone:
            first = await stream.run(make_request(make_prompt(40), max_tokens=40), prefill.info)
            talk = (*make_prompt(40), *first.tokens, *make_prompt(5, salt=1))
            one = await stream.run(make_request(talk, max_tokens=4), prefill.info)
            assert one.failed is None, one.failed
            assert one.finished is not None
            assert one.finished.local_reason == "none"
            longer = (*talk, *one.tokens, *make_prompt(5, salt=2))
            two = await stream.run(make_request(longer, max_tokens=4), prefill.info)
            assert two.failed is None, two.failed
            for tokens, answer in ((talk, one), (longer, two)):
                expected = await alone.run(make_request(tokens, max_tokens=4), None)
                assert answer.tokens == expected.tokens
            assert given_up(prefill) >= 1
            await wait_idle(prefill.info, decode.info)
        assert prefill.engine is not None
        await poll_until(lambda: prefill.engine.load().quarantined_blocks == 0)


async def test_cancelling_while_a_prefix_is_awaited_leaves_nothing() -> None:
    patience = {"connector": "fake", "fetch_timeout_ms": 3_000}
    broken = fetching(**patience, fault_script="0+:hang")
    async with LocalCluster(fetching(**patience)) as cluster:
        prefill = await cluster.start(Role.PREFILL, "prefill-0")
        decode = await cluster.start(Role.DECODE, "decode-0", broken)
        assert decode.info is not None
        async with GatewayStub(decode.info) as stream:
            first = await stream.run(make_request(make_prompt(40), max_tokens=40), prefill.info)
            talk = (*make_prompt(40), *first.tokens, *make_prompt(5, salt=1))
            answer = await stream.submit(make_request(talk, max_tokens=4), prefill.info)
            assert prefill.engine is not None
            await poll_until(lambda: prefill.engine.load().free_blocks < prefill.engine.num_blocks)
            await stream.abort(answer)
            await wait_idle(prefill.info)
            await poll_until(lambda: prefill.engine.load().quarantined_blocks == 0)


async def test_a_second_call_for_a_request_that_waits_for_its_prefix_is_refused() -> None:
    """By another decode instance, which takes it for what it is: nobody's fault in the engine."""
    hanging = fetching(connector="fake", fault_script="0+:hang")
    async with LocalCluster(fetching(connector="fake")) as cluster:
        prefill = await cluster.start(Role.PREFILL, "prefill-0")
        decode = await cluster.start(Role.DECODE, "decode-0", hanging)
        other = await cluster.start(Role.DECODE, "decode-1")
        assert prefill.engine is not None
        assert decode.info is not None
        assert other.info is not None
        async with GatewayStub(decode.info) as stream, GatewayStub(other.info) as second:
            first = await stream.run(make_request(make_prompt(40), max_tokens=40), prefill.info)
            request = make_request((*make_prompt(40), *first.tokens, 1, 2, 3), max_tokens=4)
            answer = await stream.submit(request, prefill.info)
            assert prefill.info is not None
            async with asyncio.timeout(30):
                while not (told := (await check_integrity(prefill.info)).load).waiting_seqs:
                    pass  # the blocks are taken before it waits
            assert (told.waiting_seqs, told.prompt_seqs) == (1, 1)
            assert 0 < told.waiting_tokens < len(request.token_ids)
            twin = await second.run(request, prefill.info)
            assert twin.finished is not None, twin.failed
            assert twin.finished.local_reason == "prefill_failed"
            refused = ("decode", "decode-1", "reprefill", "recompute", "invalid_request")
            assert metrics.PREFILL_FAILURES.labels(*refused)._value.get() == 1
            await stream.abort(answer)
            await wait_idle(prefill.info, other.info)


async def test_a_prompt_whose_prefill_fails_while_its_prefix_is_given_is_computed_on_decode() -> (
    None
):
    """The blocks that are being given are neither reused nor in the way of a second attempt."""
    hanging = fetching(connector="fake", fault_script="0+:hang")
    async with LocalCluster(fetching(connector="fake")) as cluster:
        prefill = await cluster.start(Role.PREFILL, "prefill-0")
        decode = await cluster.start(Role.DECODE, "decode-0", hanging)
        mixed = await cluster.start(Role.MIXED, "mixed-0")
        assert decode.info is not None
        assert mixed.info is not None
        async with GatewayStub(decode.info) as stream, GatewayStub(mixed.info) as alone:
            first = await stream.run(make_request(make_prompt(40), max_tokens=40), prefill.info)
            talk = (*make_prompt(40), *first.tokens, *make_prompt(5, salt=1))
            answer = await stream.submit(make_request(talk, max_tokens=4), prefill.info)
            assert prefill.engine is not None
            await poll_until(lambda: prefill.engine.load().free_blocks < prefill.engine.num_blocks)
            await prefill.end()
            await answer.end()
            assert answer.failed is None, answer.failed
            assert answer.finished is not None
            assert answer.finished.local_reason == "prefill_failed"
            expected = await alone.run(make_request(talk, max_tokens=4), None)
            assert answer.tokens == expected.tokens
