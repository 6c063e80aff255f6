"""Prefill on one engine, decode on another: blocks change hands without leaks or early reuse."""

from __future__ import annotations

import pytest

from isthmus.common.errors import InternalError, OutOfBlocksError
from isthmus.common.ids import RequestId
from isthmus.common.kv_events import BlocksStored
from isthmus.common.types import FinishReason, Request
from isthmus.engine.core import EngineCore
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import (
    Driver,
    Outcome,
    copy_blocks,
    generate,
    make_prompt,
    make_request,
    prefill,
)
from tests.support.tiny_model import TinyModel, make_tiny_core

pytestmark = pytest.mark.usefixtures("async_scheduling")

R = RequestId("r")


def hand_over(source: EngineCore, target: EngineCore, request: Request) -> Outcome:
    """Prefill on ``source``, move what ``target`` lacks, decode there. Both outcomes as one."""
    reservation = target.reserve(request)
    outcome = prefill(source, request)
    assert outcome.finish_reason is None
    first_block = len(reservation.cached_block_ids)
    source_ids = source.block_table(request.request_id)
    copy_blocks(source, source_ids[first_block:], target, reservation.block_ids)
    source.release_hold(request.request_id)
    target.admit_with_kv(reservation, request, outcome.token_ids[0])
    for update in Driver(target).run()[request.request_id].updates:
        outcome.add(update)
    source.check_integrity()
    return outcome


def all_free(core: EngineCore) -> bool:
    core.check_integrity()
    return core.load().free_blocks == core.load().num_blocks


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 100])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 5, "logprobs": 2},
        {"temperature": 0.8, "seed": 9, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    ],
)
def test_handed_over_request_equals_a_run_on_one_engine(
    length: int, sampling: dict[str, object]
) -> None:
    request = make_request("r", make_prompt(length), max_tokens=12, **sampling)
    (expected,) = generate(make_tiny_core(), request)
    source, target = make_tiny_core(max_num_batched_tokens=13), make_tiny_core()
    actual = hand_over(source, target, request)
    assert actual.token_ids == expected.token_ids
    assert [p.token_id for p in actual.logprobs] == [p.token_id for p in expected.logprobs]
    assert actual.finish_reason is expected.finish_reason
    assert all_free(source)
    assert all_free(target)


def test_second_turn_transfers_only_what_the_decode_engine_lacks() -> None:
    source, target = make_tiny_core(), make_tiny_core()
    first = hand_over(source, target, make_request("one", make_prompt(30)))
    longer = make_prompt(30) + tuple(first.token_ids) + make_prompt(9, salt=3)
    request = make_request("two", longer)
    reservation = target.reserve(request)
    assert reservation.num_cached_tokens == 36
    assert len(reservation.block_ids) == 3
    target.cancel_reservation(reservation, quarantine=False)
    second = hand_over(source, target, request)
    assert second.token_ids == generate(make_tiny_core(), request)[0].token_ids


def test_admitted_blocks_enter_the_prefix_cache_once_their_kv_is_there() -> None:
    source, target = make_tiny_core(), make_tiny_core()
    request = make_request("r", make_prompt(12))
    reservation = target.reserve(request)
    assert target.cached_hashes() == []
    outcome = prefill(source, request)
    copy_blocks(source, source.block_table(R), target, reservation.block_ids)
    target.admit_with_kv(reservation, request, outcome.token_ids[0])
    (stored,) = target.take_kv_events()
    assert isinstance(stored, BlocksStored)
    assert list(stored.hashes) == target.cached_hashes() == source.cached_hashes()
    assert target.load().running_seqs == 1


def test_preempted_after_handover_recomputes_and_loses_nothing() -> None:
    source, target = make_tiny_core(), make_tiny_core(num_blocks=16)
    requests = [make_request(f"r{i}", make_prompt(16, salt=i), max_tokens=20) for i in range(3)]
    firsts: dict[str, int] = {}
    for request in requests:
        reservation = target.reserve(request)
        outcome = prefill(source, request)
        source_ids = source.block_table(request.request_id)
        copy_blocks(source, source_ids, target, reservation.block_ids)
        source.release_hold(request.request_id)
        firsts[request.request_id] = outcome.token_ids[0]
        target.admit_with_kv(reservation, request, outcome.token_ids[0])
    driver = Driver(target)
    outcomes = driver.run()
    assert driver.num_preempted > 0
    for request in requests:
        (expected,) = generate(make_tiny_core(), request)
        actual = [firsts[request.request_id], *outcomes[request.request_id].token_ids]
        assert actual == expected.token_ids
    assert all_free(target)


def test_handed_over_sequences_that_fill_the_pool_help_themselves() -> None:
    """Each needs one block more to decode its first token, and none is left."""
    source, target = make_tiny_core(), make_tiny_core(num_blocks=9)
    requests = [make_request(f"r{i}", make_prompt(16, salt=i), max_tokens=4) for i in range(2)]
    reservations = [target.reserve(request) for request in requests]
    for request, reservation in zip(requests, reservations, strict=True):
        outcome = prefill(source, request)
        source_ids = source.block_table(request.request_id)
        copy_blocks(source, source_ids, target, reservation.block_ids)
        target.admit_with_kv(reservation, request, outcome.token_ids[0])
    outcomes = Driver(target).run()
    for request in requests:
        (expected,) = generate(make_tiny_core(), request)
        assert outcomes[request.request_id].token_ids == expected.token_ids[1:]
    assert all_free(target)


def test_prefill_stays_held_until_released_once_or_twice() -> None:
    core = make_tiny_core()
    outcome = prefill(core, make_request("r", make_prompt(10)))
    assert len(outcome.token_ids) == 1
    assert core.load().held_blocks == len(core.block_table(R)) == 3
    assert core.step() is None
    core.release_hold(R)
    core.release_hold(R)
    assert core.block_table(R) == ()
    assert all_free(core)
    assert core.load().cached_blocks == 2


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_prefill_that_ends_with_its_first_token_says_so(reason: FinishReason) -> None:
    prompt = make_prompt(10)
    first_token = generate(make_tiny_core(), make_request("x", prompt))[0].token_ids[0]
    sampling: dict[FinishReason, dict[str, object]] = {
        FinishReason.LENGTH: {"max_tokens": 1},
        FinishReason.STOP: {"stop_token_ids": (first_token,)},
    }
    core = make_tiny_core()
    outcome = prefill(core, make_request("r", prompt, **sampling[reason]))
    assert outcome.finish_reason is reason
    assert core.load().held_blocks == 3  # chunks of it may still be on their way
    core.release_hold(R)
    assert all_free(core)


def test_request_over_with_its_first_token_cannot_be_admitted() -> None:
    core = make_tiny_core()
    request = make_request("r", make_prompt(10), max_tokens=1)
    reservation = core.reserve(request)
    with pytest.raises(InternalError):
        core.admit_with_kv(reservation, request, 5)
    core.check_integrity()
    core.cancel_reservation(reservation, quarantine=False)
    assert all_free(core)
    with pytest.raises(InternalError, match="no reservation"):
        core.admit_with_kv(reservation, make_request("r", make_prompt(10)), 5)


def test_aborted_prefill_keeps_its_blocks_until_release() -> None:
    core = make_tiny_core(max_num_batched_tokens=8)
    core.add(make_request("r", make_prompt(30)), SequenceMode.PREFILL_ONLY)
    driver = Driver(core)
    driver.step()
    assert core.abort(R)
    driver.settle()
    assert core.load().held_blocks == 8
    core.release_hold(R)
    assert all_free(core)


def test_aborted_prefill_that_never_ran_owns_nothing() -> None:
    core = make_tiny_core()
    core.add(make_request("r", make_prompt(30)), SequenceMode.PREFILL_ONLY)
    assert core.abort(R)
    core.release_hold(R)
    assert all_free(core)


def test_release_of_a_prefill_that_still_computes_aborts_it() -> None:
    core = make_tiny_core(max_num_batched_tokens=8)
    core.add(make_request("r", make_prompt(30)), SequenceMode.PREFILL_ONLY)
    driver = Driver(core)
    driver.step()
    core.release_hold(R)
    driver.settle()
    assert all_free(core)


def test_release_while_the_model_runs_frees_when_the_step_ends() -> None:
    model = TinyModel()
    core = make_tiny_core(model)
    core.add(make_request("r", make_prompt(30)), SequenceMode.PREFILL_ONLY)
    seen: list[int] = []

    def release_in_flight() -> None:
        core.abort(R)
        core.release_hold(R)
        core.check_integrity()
        seen.append(core.load().free_blocks)

    model.before_forward = release_in_flight
    Driver(core).step()
    assert seen == [core.load().num_blocks - 8]
    assert all_free(core)


def test_failed_step_leaves_prefill_blocks_on_hold() -> None:
    model = TinyModel()
    core = make_tiny_core(model, max_num_batched_tokens=8)
    core.add(make_request("r", make_prompt(30)), SequenceMode.PREFILL_ONLY)
    driver = Driver(core)
    driver.step()
    model.fail_next = 1
    driver.step()
    assert driver.outcomes["r"].finish_reason is FinishReason.ERROR
    assert core.load().held_blocks == 8
    core.release_hold(R)
    driver.settle()
    assert all_free(core)


def test_prefill_is_never_preempted() -> None:
    """An older sequence runs out of blocks while the prefill is under way, and gives way itself."""
    core = make_tiny_core(num_blocks=17, max_num_batched_tokens=2)
    driver = Driver(core)
    core.add(make_request("full", make_prompt(8), max_tokens=40))
    core.add(make_request("r", make_prompt(48, salt=1)), SequenceMode.PREFILL_ONLY)
    table: tuple[int, ...] = ()
    while driver.step():
        now = core.block_table(R)
        assert now[: len(table)] == table
        table = now
    assert driver.num_preempted == 1
    computed = [update.num_computed_tokens for update in driver.outcomes["r"].updates]
    assert computed == sorted(computed)
    assert len(table) == core.load().held_blocks == 12
    core.release_hold(R)
    assert len(driver.run()["full"].token_ids) == 40
    assert all_free(core)


def test_held_blocks_are_not_evicted_and_waiting_work_resumes_after_release() -> None:
    core = make_tiny_core(num_blocks=11)
    prefill(core, make_request("r", make_prompt(24)))
    kept = [core.kv_store.read_block(block_id) for block_id in core.block_table(R)]
    core.add(make_request("next", make_prompt(24, salt=4)))
    assert core.step() is None
    assert not core.wait_for_work(0)  # it would only spin
    assert [core.kv_store.read_block(block_id) for block_id in core.block_table(R)] == kept
    core.release_hold(R)
    assert core.wait_for_work(0)
    assert len(Driver(core).run()["next"].token_ids) == 8
    assert all_free(core)


def test_holds_expire_by_age_and_stay_until_they_are_released() -> None:
    core = make_tiny_core()
    prefill(core, make_request("r", make_prompt(10)))
    held_at_ns = 10**18  # where the test's clock stands
    assert core.expired_holds(held_at_ns + 9_999_999, hold_ms=10) == []
    assert core.expired_holds(held_at_ns + 10_000_000, hold_ms=10) == [R]
    assert core.load().held_blocks > 0  # somebody may still read them
    core.release_hold(R)
    assert core.expired_holds(held_at_ns + 10_000_000, hold_ms=10) == []
    assert all_free(core)


def test_quarantined_blocks_stay_out_while_the_request_runs_again_locally() -> None:
    core = make_tiny_core()
    request = make_request("r", make_prompt(16))
    reservation = core.reserve(request)
    core.cancel_reservation(reservation, quarantine=True)
    core.cancel_reservation(reservation, quarantine=True)
    assert core.load().quarantined_blocks == 4
    core.add(request)
    driver = Driver(core)
    driver.step()
    assert not set(core.block_table(R)) & set(reservation.block_ids)
    late_write = core.kv_store.tensor[list(reservation.block_ids)]
    core.kv_store.tensor[list(reservation.block_ids)] = late_write + 7  # the peer's write lands
    outcomes = driver.run()
    assert outcomes["r"].token_ids == generate(make_tiny_core(), request)[0].token_ids
    core.release_quarantine(R)
    core.release_quarantine(R)
    assert all_free(core)


def test_reservation_is_refused_when_blocks_are_short_and_granted_later() -> None:
    core = make_tiny_core(num_blocks=11)
    first = core.reserve(make_request("a", make_prompt(24)))
    with pytest.raises(OutOfBlocksError) as refused:
        core.reserve(make_request("b", make_prompt(24, salt=1)))
    assert refused.value.retryable
    core.check_integrity()
    core.cancel_reservation(first, quarantine=False)
    core.cancel_reservation(core.reserve(make_request("b", make_prompt(24, salt=1))), False)
    assert all_free(core)


def test_reservation_leaves_waiting_sequences_their_blocks() -> None:
    core = make_tiny_core(num_blocks=11)
    core.add(make_request("waiting", make_prompt(24)))
    with pytest.raises(OutOfBlocksError):
        core.reserve(make_request("r", make_prompt(24, salt=1)))
    core.reserve(make_request("small", make_prompt(12, salt=1)))


def test_store_addresses_blocks_as_the_layout_says() -> None:
    core = make_tiny_core()
    prefill(core, make_request("r", make_prompt(10)))
    store = core.kv_store
    assert store.num_bytes == store.tensor.numel() * 4 == core.num_blocks * store.block_bytes
    assert store.base_address == store.tensor.data_ptr()
    block_id = core.block_table(R)[1]
    assert store.read_block(block_id) == store.tensor[block_id].numpy().tobytes()
    assert any(store.read_block(block_id))
