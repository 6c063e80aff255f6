"""Prompts computed on one worker and continued on another give what one worker alone gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.rpc import create_channel
from isthmus.protos.v1 import common_pb2, instance_pb2, instance_pb2_grpc
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import Answer, GatewayStub, make_request, wait_idle
from tests.support.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 4
CHUNK = 16  # the token budget of a step


@dataclass
class Trio:
    """A prefill, a decode and a mixed worker, and a stream to each of the latter two."""

    prefill: InstanceInfo
    decode: InstanceInfo
    mixed: InstanceInfo
    pair_stream: GatewayStub
    mixed_stream: GatewayStub

    async def both(self, tokens: tuple[int, ...], **sampling: object) -> tuple[Answer, Answer]:
        """The same request to the pair and to the mixed worker."""
        pair = await self.pair_stream.run(make_request(tokens, **sampling), self.prefill)
        mixed = await self.mixed_stream.run(make_request(tokens, **sampling), None)
        assert pair.failed is None, pair.failed
        assert mixed.failed is None, mixed.failed
        return pair, mixed

    async def flush(self) -> None:
        for info in (self.prefill, self.decode, self.mixed):
            async with create_channel(info.address) as channel:
                stub = instance_pb2_grpc.InstanceServiceStub(channel)
                await stub.FlushCache(instance_pb2.FlushCacheRequest(), timeout=60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_trio() -> AsyncIterator[Trio]:
    async with LocalCluster() as cluster:
        infos = []
        for role in (Role.PREFILL, Role.DECODE, Role.MIXED):
            worker = await cluster.start(role, f"{role.value}-0")
            assert worker.info is not None
            infos.append(worker.info)
        async with GatewayStub(infos[1]) as pair, GatewayStub(infos[2]) as mixed:
            yield Trio(*infos, pair, mixed)


@pytest_asyncio.fixture(loop_scope="module")
async def trio(running_trio: Trio) -> AsyncIterator[Trio]:
    """Cold caches before, whole pools after."""
    await running_trio.flush()
    yield running_trio
    await wait_idle(running_trio.prefill, running_trio.decode, running_trio.mixed)


def block_bytes(info: InstanceInfo) -> int:
    return info.kv_layout.block_bytes


@pytest.mark.parametrize(
    "length",
    [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 3, 150],
)
async def test_pair_equals_mixed_at_block_and_chunk_borders(trio: Trio, length: int) -> None:
    pair, mixed = await trio.both(make_prompt(length), max_tokens=20)
    assert pair.tokens == mixed.tokens
    assert len(pair.tokens) == 20
    assert pair.finished is not None
    assert pair.finished.local_reason == "none"
    num_blocks = -(-length // BLOCK)
    assert pair.finished.transferred_bytes == num_blocks * block_bytes(trio.decode)
    assert pair.finished.usage.num_prompt_tokens == length
    assert pair.finished.usage.num_output_tokens == 20


async def test_seeded_sampling_does_not_depend_on_placement(trio: Trio) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "max_tokens": 24}
    pair, mixed = await trio.both(make_prompt(37), **sampling, presence_penalty=0.5)
    other, _ = await trio.both(make_prompt(37), **{**sampling, "seed": 8})
    assert pair.tokens == mixed.tokens
    assert other.tokens != pair.tokens


async def test_requests_at_the_same_time_do_not_mix(trio: Trio) -> None:
    prompts = [make_prompt(5 + 9 * index, salt=index) for index in range(12)]
    answers = await asyncio.gather(
        *(trio.pair_stream.run(make_request(p, max_tokens=10), trio.prefill) for p in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = await trio.mixed_stream.run(make_request(prompt, max_tokens=10), None)
        assert answer.tokens == alone.tokens, len(prompt)


async def test_a_warm_prefix_is_neither_computed_nor_sent_again(trio: Trio) -> None:
    prompt = make_prompt(50)  # 12 full blocks and two tokens
    cold, _ = await trio.both(prompt)
    warm, _ = await trio.both(prompt)
    assert cold.finished is not None
    assert warm.finished is not None
    assert warm.tokens == cold.tokens
    size = block_bytes(trio.decode)
    assert cold.finished.transferred_bytes == 13 * size
    assert warm.finished.transferred_bytes == 1 * size
    assert cold.finished.usage.num_cached_tokens == 0
    assert warm.finished.usage.num_cached_tokens == 48


async def test_transferred_kv_does_not_count_as_cached(trio: Trio) -> None:
    """The decode instance has the prefix, the prefill instance does not: nothing was saved."""
    prompt = make_prompt(50)
    await trio.both(prompt)
    async with create_channel(trio.prefill.address) as channel:
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        flushed = await stub.FlushCache(instance_pb2.FlushCacheRequest(), timeout=60)
    assert flushed.num_blocks == 12
    again, _ = await trio.both(prompt)
    assert again.finished is not None
    assert again.finished.usage.num_cached_tokens == 0
    assert again.finished.transferred_bytes == block_bytes(trio.decode)


async def test_unlike_salts_share_nothing(trio: Trio) -> None:
    prompt = make_prompt(40)
    await trio.both(prompt)
    request = make_request(prompt, cache_salt="other")
    answer = await trio.pair_stream.run(request, trio.prefill)
    assert answer.finished is not None
    assert answer.finished.transferred_bytes == 10 * block_bytes(trio.decode)
    assert answer.finished.usage.num_cached_tokens == 0


async def test_a_first_token_that_stops_the_request_ends_it_at_prefill(trio: Trio) -> None:
    prompt = make_prompt(40)
    free, _ = await trio.both(prompt, max_tokens=1)
    stop = free.tokens[0]
    await trio.flush()
    pair, mixed = await trio.both(prompt, stop_token_ids=(stop,), max_tokens=9)
    for answer in (pair, mixed):
        assert answer.finished is not None
        assert answer.tokens == [stop]
        assert answer.finished.reason == common_pb2.FINISH_REASON_STOP
        assert answer.finished.stop_token_id == stop
    assert "second_token" not in pair.timeline


async def test_one_token_is_length_and_needs_no_decode_step(trio: Trio) -> None:
    pair, mixed = await trio.both(make_prompt(23), max_tokens=1)
    for answer in (pair, mixed):
        assert answer.finished is not None
        assert len(answer.tokens) == 1
        assert answer.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert not answer.finished.HasField("stop_token_id")
    assert pair.tokens == mixed.tokens


async def test_a_stop_token_below_min_tokens_does_not_stop(trio: Trio) -> None:
    prompt = make_prompt(21)
    free, _ = await trio.both(prompt, max_tokens=12)
    stop = free.tokens[0]
    pair, mixed = await trio.both(prompt, stop_token_ids=(stop,), min_tokens=3, max_tokens=12)
    assert pair.tokens == mixed.tokens
    assert len(pair.tokens) > 3


async def test_logprobs_cover_every_token_with_equal_values(trio: Trio) -> None:
    pair, mixed = await trio.both(make_prompt(30), logprobs=3, max_tokens=6)
    assert [item.token_id for item in pair.logprobs] == pair.tokens
    assert [item.token_id for item in mixed.logprobs] == mixed.tokens
    for a, b in zip(pair.logprobs, mixed.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert [t.token_id for t in a.top] == [t.token_id for t in b.top]
        assert len(a.top) == 3


async def test_prompt_logprobs_come_once_and_equal(trio: Trio) -> None:
    prompt = make_prompt(19)
    pair, mixed = await trio.both(prompt, prompt_logprobs=0, max_tokens=3)
    assert [item.token_id for item in pair.prompt_logprobs] == list(prompt[1:])
    assert len(pair.prompt_logprobs) == len(mixed.prompt_logprobs)
    for a, b in zip(pair.prompt_logprobs, mixed.prompt_logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


async def test_a_resumed_request_goes_on_where_it_stopped(trio: Trio) -> None:
    prompt = make_prompt(26)
    sampling = {"temperature": 0.8, "seed": 3, "max_tokens": 14}
    whole, _ = await trio.both(prompt, **sampling)
    for count in (1, 5, 13):
        request = make_request((*prompt, *whole.tokens[:count]), num_resumed=count, **sampling)
        rest = await trio.pair_stream.run(request, trio.prefill)
        assert rest.failed is None
        assert rest.tokens == whole.tokens[count:]
        assert rest.finished is not None
        assert rest.finished.usage.num_prompt_tokens == 26
        assert rest.finished.usage.num_output_tokens == 14


async def test_events_of_a_request_are_in_order(trio: Trio) -> None:
    pair, mixed = await trio.both(make_prompt(60), max_tokens=5)
    order = ["admitted", "prefill_queued", "scheduled", "prefilled", "kv_ready", "second_token"]
    times = [pair.timeline[event] for event in order]
    assert times == sorted(times)
    assert pair.timeline["prefilled"] <= pair.timeline["first_token"]
    assert {"admitted", "scheduled", "prefilled", "first_token"} <= mixed.timeline.keys()
    assert "kv_ready" not in mixed.timeline
    first, second = pair.early_timelines
    assert {"admitted", "scheduled", "prefilled", "first_token"} <= first.keys()
    assert second == pair.timeline
    assert mixed.finished is not None
    assert mixed.finished.local_reason == "mixed_role"


async def test_tokens_of_one_step_travel_in_one_message(trio: Trio) -> None:
    before = trio.mixed_stream.num_messages
    prompts = [make_prompt(4, salt=index) for index in range(4)]
    answers = await asyncio.gather(
        *(trio.mixed_stream.run(make_request(p, max_tokens=16), None) for p in prompts)
    )
    assert sum(len(answer.tokens) for answer in answers) == 64
    assert trio.mixed_stream.num_messages - before < 48
