"""Whatever goes wrong between two workers: the answer is right, at worst late; nothing leaks."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest

from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.errors import ChecksumError
from isthmus.common.ids import InstanceId
from isthmus.common.metrics import CORRUPT_BLOCKS
from isthmus.common.rpc import create_channel
from isthmus.common.types import InstanceRef
from isthmus.decode_worker.prefill_client import PrefillClient
from isthmus.protos.convert.requests import request_to_pb
from isthmus.protos.v1 import prefill_pb2, prefill_pb2_grpc
from isthmus.worker.lifecycle import ExitCode
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import GatewayStub, check_integrity, make_request, wait_idle
from tests.support.local_cluster import GatedModel, local_config
from tests.support.movable_clock import MovableClock
from tests.support.poll import poll_until
from tests.support.worker_pair import (
    LONG_PROMPT,
    PROMPT,
    LocalPair,
    assert_fell_back,
    faulty,
    local_pair,
    remedies,
    run_with_alternate,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.fault, pytest.mark.timeout(120)]


# --- transfers that go wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("script", ["0:refuse", "2:refuse", "0:fail", "3:fail"])
async def test_a_failed_write_costs_only_latency(script: str) -> None:
    """After a write that failed half-way nobody can say what may still land: the blocks rest after
    the sender has ended."""
    async with local_pair(faulty(script)) as pair:
        answer = await pair.run(max_tokens=12)
        await pair.wait_idle()
        assert_fell_back(answer, await pair.local(max_tokens=12))
        good = await pair.run(max_tokens=12, seed=1)
        assert good.finished is not None
        assert good.finished.local_reason == "none"
        await pair.wait_idle()


@pytest.mark.parametrize("script", ["0+:hang", "1:hang", "3:drop"])
async def test_a_transfer_that_stalls_ends_long_before_its_request(script: str) -> None:
    async with local_pair(faulty(script, deadline_ms=700)) as pair:
        request = make_request(PROMPT, max_tokens=12, timeout_ms=600_000)
        answer = await pair.stream.submit(request, pair.prefill_info)
        await answer.end(60)
        assert_fell_back(answer, await pair.local(max_tokens=12))
        # The hung write never ends: what rests here ends with the sender's word that it has ended.
        await wait_idle(pair.decode_info)
        assert pair.prefill.engine is not None
        prefill = pair.prefill.engine
        await poll_until(lambda: prefill.load().held_blocks == 0)


async def num_receives(info: InstanceInfo) -> int:
    states = (await check_integrity(info)).sessions_by_state
    return sum(num for state, num in states.items() if state.startswith("receive:"))


async def test_waiting_for_a_slow_prefill_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst queues for longer than the patience that a transfer gets."""
    clock = MovableClock()
    monkeypatch.setattr("isthmus.worker.process.SystemClock", lambda: clock)
    config = local_config(transfer={"connector": "local", "deadline_ms": 20_000})
    async with local_pair(config) as pair:
        model = pair.prefill.model
        model.gate.clear()
        requests = [
            make_request(make_prompt(24, salt), max_tokens=4, timeout_ms=600_000)
            for salt in range(8)
        ]
        answers = [await pair.stream.submit(request, pair.prefill_info) for request in requests]
        await poll_until(lambda: model.num_held == 1)
        async with asyncio.timeout(60):
            while await num_receives(pair.decode_info) < len(requests):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # All of them wait. Not for longer: a step that takes a minute is a hung one.
        clock.advance_ms(40_000)
        model.gate.set()
        for request, answer in zip(requests, answers, strict=True):
            await answer.end()
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "none"
            alone = make_request(
                request.token_ids, max_tokens=4, cache_salt="alone", timeout_ms=600_000
            )
            assert answer.tokens == (await pair.stream.run(alone, None)).tokens
        await pair.wait_idle()


async def test_logprobs_of_the_first_token_are_not_repeated_on_fallback() -> None:
    async with local_pair(faulty("3:refuse")) as pair:
        answer = await pair.run(max_tokens=5, logprobs=2, prompt_logprobs=0)
        expected = await pair.local(max_tokens=5, logprobs=2, prompt_logprobs=0)
        assert_fell_back(answer, expected)
        assert [item.token_id for item in answer.logprobs] == answer.tokens
        assert [item.token_id for item in answer.prompt_logprobs] == list(PROMPT[1:])
        await pair.wait_idle()


@pytest.mark.parametrize("script", ["0:flip", "2:flip", "3:corrupt", "0+:flip"])
async def test_a_corrupt_chunk_never_reaches_a_client(script: str) -> None:
    corrupt = CORRUPT_BLOCKS.labels("decode", "decode-0", "fake")
    before = corrupt._value.get()
    async with local_pair(faulty(script)) as pair:
        answer = await pair.run(max_tokens=9)
        assert_fell_back(answer, await pair.local(max_tokens=9))
        assert corrupt._value.get() > before
        await pair.wait_idle()
        # The prefix that was computed here is sound, also for those that share it.
        again = await pair.stream.run(make_request(PROMPT, max_tokens=9), None)
        assert again.tokens == answer.tokens


async def test_unlike_layouts_are_refused_and_the_prompt_computed_here() -> None:
    async with local_pair(seed=1) as pair:  # other weights: KV would mean something else
        answer = await pair.run(max_tokens=6)
        assert_fell_back(answer, await pair.local(max_tokens=6))
        assert answer.finished is not None
        assert answer.finished.transferred_bytes == 0
        await pair.wait_idle()


async def test_a_silent_peer_holds_nobody_longer_than_one_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All requests that wait for it share one attempt and its end. The attempt begins when all of
    them wait."""
    num_waiting, all_wait = 0, asyncio.Event()
    attempts: list[InstanceRef] = []
    ensure, shake = PrefillClient.ensure_handshake, PrefillClient._shake_hands

    async def ensure_handshake(client: PrefillClient, ref: InstanceRef) -> None:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == 4:
            all_wait.set()
        await ensure(client, ref)

    async def shake_hands(client: PrefillClient, ref: InstanceRef) -> None:
        attempts.append(ref)
        await all_wait.wait()
        await shake(client, ref)

    monkeypatch.setattr(PrefillClient, "ensure_handshake", ensure_handshake)
    monkeypatch.setattr(PrefillClient, "_shake_hands", shake_hands)
    transfer = {"connector": "local", "handshake_timeout_ms": 600, "quarantine_ms": 200}
    async with local_pair(local_config(transfer=transfer)) as pair:
        silent = socket.create_server(("127.0.0.1", 0))  # connects, and never says a word
        host, port = silent.getsockname()
        ghost = replace(
            pair.prefill_info, instance_id=InstanceId("ghost"), address=f"{host}:{port}"
        )
        answers = [
            await pair.stream.submit(make_request(make_prompt(20, salt), max_tokens=1), ghost)
            for salt in range(4)
        ]
        for answer in answers:
            await answer.end()
            assert answer.finished is not None
            assert answer.finished.local_reason == "prefill_failed"
        assert attempts == [ghost.ref]
        silent.close()
        await pair.wait_idle()


async def test_a_peer_that_dies_in_the_handshake_costs_only_latency() -> None:
    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)  # its first word has come
        writer.close()

    async with local_pair() as pair:
        dying = await asyncio.start_server(hangs_up, "127.0.0.1", 0)
        host, port = dying.sockets[0].getsockname()
        ghost = replace(
            pair.prefill_info, instance_id=InstanceId("ghost"), address=f"{host}:{port}"
        )
        answer = await pair.stream.run(pair.request(max_tokens=4), ghost)
        assert_fell_back(answer, await pair.local(max_tokens=4))
        await pair.wait_idle()
        dying.close()
        await dying.wait_closed()


# --- another prefill instance ---------------------------------------------------------------------


async def test_another_prefill_instance_is_asked_before_the_prompt_is_computed_here() -> None:
    before = remedies("transfer_failed")
    async with local_pair(faulty("0+:refuse"), prompt=LONG_PROMPT) as pair:
        answer, alternate = await run_with_alternate(pair, "")
        assert answer.finished is not None, answer.failed
        assert answer.tokens == (await pair.local(max_tokens=9)).tokens
        assert answer.finished.local_reason == "none"
        assert list(answer.finished.failed_prefills) == ["prefill-0"]
        assert answer.started is not None
        assert list(answer.started.failed_prefills) == ["prefill-0"]
        assert remedies("transfer_failed") == {**before, "reprefill": before["reprefill"] + 1}
        await pair.wait_idle()
        await wait_idle(alternate)


async def test_when_the_other_fails_too_the_prompt_is_computed_here() -> None:
    # Of the second's faults either is noticed first: the flipped block or the refused write.
    reasons = ("transfer_failed", ChecksumError.code)
    before = {reason: remedies(reason) for reason in reasons}
    async with local_pair(faulty("0:refuse"), prompt=LONG_PROMPT) as pair:
        answer, alternate = await run_with_alternate(pair, "0:flip,2:refuse")
        assert_fell_back(answer, await pair.local(max_tokens=9))
        assert answer.finished is not None
        assert list(answer.finished.failed_prefills) == ["prefill-0", "prefill-1"]
        after = {reason: remedies(reason) for reason in reasons}
        grown = {
            remedy: sum(after[reason][remedy] - before[reason][remedy] for reason in reasons)
            for remedy in ("reprefill", "recompute")
        }
        assert grown == {"reprefill": 1, "recompute": 1}
        await pair.wait_idle()
        await wait_idle(alternate)


async def test_after_the_first_token_nobody_else_is_asked() -> None:
    async with local_pair(faulty("3:refuse")) as pair:
        answer, alternate = await run_with_alternate(pair, "")
        assert_fell_back(answer, await pair.local(max_tokens=9))
        await pair.wait_idle()
        await wait_idle(alternate)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_the_operator_may_want_no_second_attempt(policy: str) -> None:
    before = remedies("transfer_failed", policy)
    async with local_pair(faulty("0+:refuse", on_failure=policy)) as pair:
        answer, alternate = await run_with_alternate(pair, "")
        if policy == "fail":
            assert answer.failed is not None
            assert answer.failed.error.code == "prefill_failed"
            assert not answer.failed.error.retryable
        else:
            assert_fell_back(answer, await pair.local(max_tokens=9))
        assert remedies("transfer_failed", policy) == {**before, policy: before[policy] + 1}
        await pair.wait_idle()
        await wait_idle(alternate)


# --- cancels -------------------------------------------------------------------------------------


async def test_cancel_while_waiting_for_blocks() -> None:
    async with local_pair() as pair:
        pair.prefill.model.gate.clear()
        first = await pair.submit(max_tokens=200)
        blocked = [
            await pair.stream.submit(
                make_request(make_prompt(200, salt=salt), max_tokens=4), pair.prefill_info
            )
            for salt in (1, 2)
        ]
        await poll_until(lambda: pair.prefill.model.num_held > 0)
        for answer in (*blocked, first):
            await pair.stream.abort(answer)
        pair.prefill.model.gate.set()
        await pair.wait_idle()
        assert all(answer.finished is None for answer in (*blocked, first))
        good = await pair.run()
        assert good.finished is not None


async def test_cancel_during_prefill_stops_it_at_the_next_chunk() -> None:
    async with local_pair() as pair:
        pair.prefill.model.gate.clear()
        answer = await pair.submit()
        await poll_until(lambda: pair.prefill.model.num_held == 1)
        steps = len(pair.prefill.model.forward_sizes)
        await pair.stream.abort(answer)
        await wait_idle(pair.decode_info)  # nothing was on its way: the sender says so at once
        pair.prefill.model.gate.set()
        await pair.wait_idle()
        assert len(pair.prefill.model.forward_sizes) == steps + 1  # the chunk under way, no other
        assert answer.tokens == []


async def test_cancel_after_the_first_token_while_kv_is_on_its_way() -> None:
    async with local_pair(faulty("3:delay=400")) as pair:
        answer = await pair.submit()
        await asyncio.wait_for(answer.has_token.wait(), 60)
        await pair.stream.abort(answer)
        await pair.wait_idle()
        assert len(answer.tokens) == 1


async def test_cancel_while_decoding() -> None:
    async with local_pair() as pair:
        answer = await pair.submit(max_tokens=150)
        await poll_until(lambda: len(answer.tokens) > 3)
        await pair.stream.abort(answer)
        await pair.wait_idle()
        assert answer.finished is None
        assert len(answer.tokens) < 150


async def test_the_end_of_a_stream_aborts_its_requests() -> None:
    async with local_pair() as pair:
        async with GatewayStub(pair.decode_info) as other:
            answers = [
                await other.submit(make_request(make_prompt(30, salt), max_tokens=150), source)
                for salt, source in enumerate((pair.prefill_info, None, pair.prefill_info))
            ]
            await poll_until(lambda: any(answer.tokens for answer in answers))
        await pair.wait_idle()


# --- deadlines -----------------------------------------------------------------------------------


async def stage_at_deadline(pair: LocalPair, held: GatedModel) -> str:
    """Where a request was whose deadline passed while ``held`` held it at its gate: the first of
    ever longer deadlines that lets it come so far."""
    for timeout_ms in (500, 4_000, 20_000):
        request = make_request(PROMPT, timeout_ms=timeout_ms, max_tokens=9)
        answer = await pair.stream.run(request, pair.prefill_info)
        assert answer.failed is not None
        assert answer.failed.error.code == "deadline_exceeded"
        if held.num_held:
            return answer.failed.error.stage
    raise AssertionError("no deadline was long enough")


async def test_a_deadline_during_prefill_ends_the_request_on_both_sides() -> None:
    async with local_pair() as pair:
        pair.prefill.model.gate.clear()
        assert await stage_at_deadline(pair, pair.prefill.model) == "prefilling"
        pair.prefill.model.gate.set()
        await pair.wait_idle()


async def test_a_deadline_while_decoding_ends_the_request() -> None:
    async with local_pair() as pair:
        pair.decode.model.gate.clear()
        assert await stage_at_deadline(pair, pair.decode.model) == "running"
        pair.decode.model.gate.set()
        await pair.wait_idle()


# --- the prefill instance goes -------------------------------------------------------------------


async def test_a_draining_prefill_instance_refuses_and_ends_in_order() -> None:
    async with local_pair() as pair:
        pair.prefill.model.gate.clear()
        running = await pair.submit(max_tokens=6)
        await poll_until(lambda: pair.prefill.model.num_held == 1)
        pair.prefill.stop.drain("test", 20_000)
        await poll_until(lambda: pair.prefill.info is not None and pair.prefill.stop.is_set)
        refused = await pair.submit(max_tokens=6)
        await refused.end()
        expected = await pair.local(max_tokens=6)
        assert_fell_back(refused, expected)
        pair.prefill.model.gate.set()
        await running.end()
        assert running.tokens == expected.tokens
        assert running.finished is not None
        assert running.finished.local_reason == "none"
        assert pair.prefill.task is not None
        assert await asyncio.wait_for(pair.prefill.task, 60) is ExitCode.OK
        await wait_idle(pair.decode_info)
        assert await pair.cluster.find("prefill-0") is None


async def test_a_prefill_instance_that_ends_at_once_costs_only_latency() -> None:
    async with local_pair() as pair:
        pair.prefill.model.gate.clear()
        answer = await pair.submit(max_tokens=9)
        await poll_until(lambda: pair.prefill.model.num_held == 1)
        pair.prefill.stop.fail("test")
        await answer.end()
        pair.prefill.model.gate.set()
        assert_fell_back(answer, await pair.local(max_tokens=9))
        assert pair.prefill.task is not None
        assert await asyncio.wait_for(pair.prefill.task, 60) is ExitCode.FAULT
        await wait_idle(pair.decode_info)


async def test_a_restarted_prefill_instance_is_met_again() -> None:
    async with local_pair() as pair:
        before = await pair.run()
        assert before.finished is not None
        await pair.prefill.end()
        gone = await pair.run()
        assert_fell_back(gone, before)
        again = await pair.cluster.start(Role.PREFILL, "prefill-0")
        assert again.info is not None
        assert again.info.epoch == 2
        fresh = make_request(make_prompt(44, salt=5))
        answer = await pair.stream.run(fresh, again.info)
        assert answer.finished is not None
        assert answer.finished.local_reason == "none"
        # A decision that was made before the restart: refused by epoch, computed here.
        stale = await pair.stream.run(make_request(make_prompt(44, salt=6)), pair.prefill_info)
        assert stale.finished is not None
        assert stale.finished.local_reason == "prefill_failed"
        await wait_idle(again.info, pair.decode_info)


async def test_an_engine_that_fails_ends_its_process_with_a_fault() -> None:
    async with local_pair() as pair:
        pair.prefill.model.fail_next = 1_000
        for _ in range(5):
            answer = await pair.run(max_tokens=4)
            assert answer.finished is not None
            assert answer.finished.local_reason == "prefill_failed"
            if pair.prefill.stop.is_set:
                break
        assert pair.prefill.task is not None
        assert await asyncio.wait_for(pair.prefill.task, 60) is ExitCode.FAULT
        await wait_idle(pair.decode_info)


# --- input that nothing may be spent on ----------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "sampling", "code"),
    [
        ((1, 2, 1000), {}, "invalid_request"),
        (make_prompt(300), {}, "context_length_exceeded"),
        ((1, 2), {"max_tokens": 0}, "invalid_request"),
    ],
)
async def test_bad_input_costs_neither_blocks_nor_prefill(
    tokens: tuple[int, ...], sampling: dict[str, object], code: str
) -> None:
    async with local_pair() as pair:
        steps = len(pair.prefill.model.forward_sizes)
        answer = await pair.stream.run(make_request(tokens, **sampling), pair.prefill_info)
        assert answer.failed is not None
        assert answer.failed.error.code == code
        assert len(pair.prefill.model.forward_sizes) == steps
        await pair.wait_idle()


async def test_an_id_that_is_being_served_is_refused_and_the_first_goes_on() -> None:
    # A write that is slow to land keeps the first one unfinished until its twin has come.
    async with local_pair(faulty("0:delay=400")) as pair:
        request = make_request(PROMPT, max_tokens=40)
        answer = await pair.stream.submit(request, pair.prefill_info)
        async with GatewayStub(pair.decode_info) as other:
            twin = await other.run(request, pair.prefill_info)
        assert twin.failed is not None
        assert twin.failed.error.code == "invalid_request"
        await answer.end()
        assert answer.finished is not None
        await pair.wait_idle()


async def test_a_transfer_that_was_ended_before_it_arrived_is_refused() -> None:
    async with local_pair() as pair, create_channel(pair.prefill_info.address) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        reply = await stub.Abort(prefill_pb2.AbortRequest(transfer_id=b"x" * 16), timeout=60)
        assert reply.quiesced
        message = prefill_pb2.PrefillRequest(request=request_to_pb(make_request(PROMPT)))
        message.ticket.transfer_id = b"x" * 16
        updates = [update async for update in stub.Prefill(message, timeout=60)]
        assert [update.WhichOneof("update") for update in updates] == ["failed"]
        assert updates[0].failed.error.code == "cancelled"
        assert updates[0].failed.quiesced
