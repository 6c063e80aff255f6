"""What a request gets does not depend on how its tokens were batched, chunked or cached."""

from __future__ import annotations

import pytest

from isthmus.common.errors import ContextLengthError, InternalError, InvalidRequestError
from isthmus.common.types import FinishReason, Request
from isthmus.engine.core import EngineCore
from isthmus.engine.sequence import SeqStatus
from isthmus.engine.steps import MAX_FAILED_STEPS
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import Driver, Outcome, generate, make_prompt, make_request
from tests.support.tiny_model import TinyModel, make_tiny_core

pytestmark = pytest.mark.usefixtures("async_scheduling")

SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


def alone(request: Request, **engine: object) -> Outcome:
    (outcome,) = generate(make_tiny_core(**engine), request)
    return outcome


@pytest.mark.parametrize("sampling", [{}, SEEDED])
@pytest.mark.parametrize("budget", [1, 3, 4, 5, 21, 64])
def test_output_does_not_depend_on_chunk_size(budget: int, sampling: dict[str, object]) -> None:
    request = make_request("r", make_prompt(21), **sampling)
    expected = alone(request, max_num_batched_tokens=512)
    actual = alone(request, max_num_batched_tokens=budget)
    assert len(expected.token_ids) == 8
    assert actual.token_ids == expected.token_ids


@pytest.mark.parametrize("sampling", [{}, SEEDED])
def test_output_does_not_depend_on_the_batch(sampling: dict[str, object]) -> None:
    requests = [
        make_request(f"r{i}", make_prompt(5 + 9 * i, salt=i), max_tokens=4 + i, **sampling)
        for i in range(6)
    ]
    together = generate(make_tiny_core(), *requests)
    for request, outcome in zip(requests, together, strict=True):
        assert outcome.token_ids == alone(request).token_ids


def test_seed_decides_and_position_counts() -> None:
    outputs = [
        alone(make_request("r", make_prompt(9), **{**SEEDED, "seed": seed})).token_ids
        for seed in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("sampling", [{}, SEEDED, {**SEEDED, "frequency_penalty": 0.7}])
def test_resumed_request_continues_as_if_never_interrupted(sampling: dict[str, object]) -> None:
    prompt = make_prompt(13)
    whole = alone(make_request("r", prompt, max_tokens=10, **sampling)).token_ids
    delivered = tuple(whole[:4])
    resumed = make_request("r", prompt + delivered, 4, max_tokens=10, **sampling)
    assert alone(resumed).token_ids == whole[4:]


@pytest.mark.parametrize("sampling", [{}, SEEDED])
def test_preempted_sequence_keeps_its_output_tokens(sampling: dict[str, object]) -> None:
    requests = [
        make_request(f"r{i}", make_prompt(12, salt=i), max_tokens=24, **sampling) for i in range(4)
    ]
    core = make_tiny_core(num_blocks=20)
    for request in requests:
        core.add(request)
    driver = Driver(core)
    outcomes = driver.run()
    assert driver.num_preempted > 0
    for request in requests:
        assert outcomes[request.request_id].token_ids == alone(request).token_ids
    assert core.load().free_blocks == core.load().num_blocks


def test_prefix_hit_gives_the_same_result() -> None:
    core = make_tiny_core()
    request = make_request("first", make_prompt(30))
    (first,) = generate(core, request)
    (again,) = generate(core, make_request("again", make_prompt(30)))
    (longer,) = generate(core, make_request("longer", make_prompt(30) + tuple(first.token_ids)))
    assert again.token_ids == first.token_ids
    assert again.num_cached_tokens == 28
    assert longer.num_cached_tokens == 36  # the output's full blocks are cached as well
    assert (
        longer.token_ids
        == alone(make_request("longer", make_prompt(30) + tuple(first.token_ids))).token_ids
    )


def test_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    core = make_tiny_core()
    (first,) = generate(core, make_request("first", make_prompt(32)))
    (again,) = generate(core, make_request("again", make_prompt(32)))
    assert again.num_cached_tokens == 28
    assert again.token_ids == first.token_ids


def test_a_private_sequence_neither_finds_nor_leaves_a_prefix() -> None:
    core = make_tiny_core()
    driver = Driver(core)
    prompt = make_prompt(30)
    core.add(make_request("own", make_prompt(21, salt=2)), SequenceMode.PRIVATE)
    assert driver.run()["own"].token_ids
    assert core.cached_hashes() == []
    core.add(make_request("first", prompt))
    first = driver.run()["first"]
    known = set(core.cached_hashes())
    core.add(make_request("again", prompt), SequenceMode.PRIVATE)
    again = driver.run()["again"]
    assert again.token_ids == first.token_ids
    assert again.num_cached_tokens == 0
    assert set(core.cached_hashes()) == known


def test_cache_salt_keeps_tenants_apart() -> None:
    core = make_tiny_core()
    request = make_request("a", make_prompt(20))
    generate(core, request)
    salted = Request(
        **{
            name: getattr(request, name)
            for name in ("model", "token_ids", "sampling", "arrival_ns", "deadline_ns")
        },
        request_id=request.request_id,
        cache_salt="other tenant",
    )
    (outcome,) = generate(core, salted)
    assert outcome.num_cached_tokens == 0


def test_flushed_cache_gives_no_hits_and_running_sequences_go_on() -> None:
    core = make_tiny_core()
    driver = Driver(core)
    core.add(make_request("r", make_prompt(20)))
    driver.step()
    assert core.flush_cache() == 5
    outcome = driver.run()["r"]
    assert outcome.token_ids == alone(make_request("r", make_prompt(20))).token_ids
    core.flush_cache()
    (again,) = generate(core, make_request("again", make_prompt(20)))
    assert again.num_cached_tokens == 0


def test_prompt_logprobs_cover_the_prompt_whatever_the_chunks_and_the_cache() -> None:
    core = make_tiny_core(max_num_batched_tokens=7)
    request = make_request("r", make_prompt(18), prompt_logprobs=2, logprobs=1)
    generate(core, make_request("warm", make_prompt(18)))
    (outcome,) = generate(core, request)
    whole = alone(request, max_num_batched_tokens=512)
    assert [p.token_id for p in outcome.prompt_logprobs] == list(make_prompt(18))[1:]
    assert outcome.num_cached_tokens == 0
    for part, expected in zip(outcome.prompt_logprobs, whole.prompt_logprobs, strict=True):
        assert part.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [i for i, _ in part.top] == [i for i, _ in expected.top]
    assert len(outcome.logprobs) == len(outcome.token_ids)
    assert all(entry.rank == 0 for entry in outcome.logprobs)
    first_update = next(u for u in outcome.updates if u.token_ids)
    assert len(first_update.prompt_logprobs) == 17


def test_prompt_logprobs_come_once_when_the_prompt_is_computed_twice() -> None:
    core = make_tiny_core(num_blocks=17, max_num_batched_tokens=2)
    core.add(make_request("older", make_prompt(8), max_tokens=40))
    core.add(make_request("r", make_prompt(48, salt=1), prompt_logprobs=0))
    driver = Driver(core)
    outcome = driver.run()["r"]
    assert driver.num_preempted > 0
    assert [p.token_id for p in outcome.prompt_logprobs] == list(make_prompt(48, salt=1))[1:]


def test_prompt_logprobs_agree_with_output_logprobs_of_the_same_tokens() -> None:
    prompt = make_prompt(10)
    generated = alone(make_request("r", prompt, logprobs=0))
    replayed = alone(
        make_request("r", prompt + tuple(generated.token_ids), prompt_logprobs=0, max_tokens=1)
    )
    tail = replayed.prompt_logprobs[-len(generated.token_ids) :]
    for output, replay in zip(generated.logprobs, tail, strict=True):
        assert output.logprob == pytest.approx(replay.logprob, abs=1e-5)


def test_stop_token_ends_the_sequence_and_is_reported() -> None:
    whole = alone(make_request("r", make_prompt(9))).token_ids
    stop = whole[3]
    outcome = alone(make_request("r", make_prompt(9), stop_token_ids=(stop,)))
    assert outcome.token_ids == whole[: whole.index(stop) + 1]
    assert outcome.finish_reason is FinishReason.STOP
    assert outcome.updates[-1].stop_token_id == stop


def test_min_tokens_holds_a_stop_token_back() -> None:
    first = alone(make_request("r", make_prompt(9))).token_ids[0]
    outcome = alone(make_request("r", make_prompt(9), stop_token_ids=(first,), min_tokens=3))
    assert first not in outcome.token_ids[:3]
    assert len(outcome.token_ids) >= 3


def test_length_ends_at_max_tokens_and_at_the_longest_sequence() -> None:
    assert alone(make_request("r", make_prompt(9), max_tokens=3)).finish_reason is (
        FinishReason.LENGTH
    )
    core = make_tiny_core(num_blocks=6)
    assert core.max_model_len == 20
    (outcome,) = generate(core, make_request("r", make_prompt(15), max_tokens=100))
    assert len(outcome.token_ids) == 5
    assert outcome.finish_reason is FinishReason.LENGTH


def test_every_chunk_is_reported() -> None:
    outcome = alone(make_request("r", make_prompt(21), max_tokens=2), max_num_batched_tokens=8)
    assert [u.num_computed_tokens for u in outcome.updates] == [8, 16, 21, 22]
    assert [len(u.token_ids) for u in outcome.updates] == [0, 0, 1, 1]
    assert all(u.scheduled_ns == outcome.updates[0].scheduled_ns > 0 for u in outcome.updates)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request("r", make_prompt(512)), ContextLengthError),
        (make_request("r", ()), InvalidRequestError),
        (make_request("r", (1, 64)), InvalidRequestError),
        (make_request("r", (1, -1)), InvalidRequestError),
        (make_request("r", (1, 2), logit_bias=((64, 1.0),)), InvalidRequestError),
        (make_request("r", (1, 2, 3), 2, max_tokens=2), InvalidRequestError),
        (make_request("r", (1, 2), temperature=-1.0), InvalidRequestError),
        (make_request("r", (1, 2), repetition_penalty=0.0), InvalidRequestError),
    ],
)
def test_request_that_would_break_a_step_is_refused(
    request_: Request, error: type[Exception]
) -> None:
    core = make_tiny_core(num_blocks=200)
    with pytest.raises(error):
        core.add(request_)
    with pytest.raises(error):
        core.reserve(request_)
    assert core.step() is None
    core.check_integrity()


def test_request_id_cannot_be_used_twice_at_once() -> None:
    core = make_tiny_core()
    core.add(make_request("r", make_prompt(4)))
    with pytest.raises(InternalError):
        core.add(make_request("r", make_prompt(4)))
    with pytest.raises(InternalError):
        core.reserve(make_request("r", make_prompt(4)))
    Driver(core).run()
    core.add(make_request("r", make_prompt(4)))


def broken_core(failures: int) -> tuple[EngineCore, TinyModel]:
    model = TinyModel()
    model.fail_next = failures
    return make_tiny_core(model), model


def test_failed_step_ends_its_sequences_and_the_engine_goes_on() -> None:
    core, _ = broken_core(1)
    requests = [make_request(f"r{i}", make_prompt(6, salt=i)) for i in range(2)]
    for request in requests:
        core.add(request)
    outcomes = Driver(core).run()
    for request in requests:
        update = outcomes[request.request_id].updates[-1]
        assert update.finish_reason is FinishReason.ERROR
        assert isinstance(update.error, InternalError)
        assert update.token_ids == ()
    assert core.load().free_blocks == core.load().num_blocks
    (after,) = generate(core, requests[0])
    assert after.token_ids == alone(requests[0]).token_ids


def test_repeated_failure_is_fatal_once_its_updates_are_out() -> None:
    core, _ = broken_core(MAX_FAILED_STEPS)
    for index in range(MAX_FAILED_STEPS):
        core.add(make_request(f"r{index}", make_prompt(5), max_tokens=1))
        output = core.step()
        assert output is not None
        assert output.updates[0].error is not None
    assert core.wait_for_work(0)
    with pytest.raises(InternalError, match="in a row"):
        core.step()
    core.check_integrity()


def test_failures_with_a_success_between_them_are_not_fatal() -> None:
    core, model = broken_core(0)
    for index in range(2 * MAX_FAILED_STEPS):
        model.fail_next = 1
        core.add(make_request(f"bad{index}", make_prompt(5)))
        Driver(core).run()
        generate(core, make_request(f"good{index}", make_prompt(5)))


def test_row_of_nan_fails_its_sequence_alone() -> None:
    model = TinyModel()
    model.poison_token = 63
    core = make_tiny_core(model)
    bad, good = make_request("bad", (1, 2, 63)), make_request("good", (1, 2, 3), max_tokens=1)
    outcomes = generate(core, bad, good)
    assert outcomes[0].finish_reason is FinishReason.ERROR
    assert outcomes[0].updates[-1].error is not None
    assert outcomes[1].finish_reason is FinishReason.LENGTH


def test_abort_in_every_status_gives_all_blocks_back() -> None:
    core = make_tiny_core(max_num_batched_tokens=8, max_num_seqs=2)
    driver = Driver(core)
    for name in ("decoding", "prefilling", "waiting"):
        core.add(make_request(name, make_prompt(8 if name == "decoding" else 30)))
    driver.step()
    driver.step()
    assert core.load().running_seqs == 2
    assert core.load().waiting_seqs == 1
    for name in ("decoding", "prefilling", "waiting"):
        assert core.abort(make_request(name, (1,)).request_id)
        core.check_integrity()
        assert not core.abort(make_request(name, (1,)).request_id)
    driver.settle()
    assert core.load().free_blocks == core.load().num_blocks


def test_abort_of_a_preempted_sequence() -> None:
    core = make_tiny_core(num_blocks=11)
    driver = Driver(core)
    for index in range(2):
        core.add(make_request(f"r{index}", make_prompt(12, salt=index), max_tokens=20))
    while driver.num_preempted == 0:
        assert driver.step()
    preempted = core._owners.find(make_request("r1", (1,)).request_id)
    assert preempted is not None
    assert preempted.status is SeqStatus.PREEMPTED
    assert core.abort(preempted.request_id)
    driver.run()
    assert len(driver.outcomes["r0"].token_ids) == 20
    assert core.load().free_blocks == core.load().num_blocks


def test_abort_while_the_model_runs_keeps_blocks_until_the_step_ends() -> None:
    model = TinyModel()
    core = make_tiny_core(model)
    request = make_request("r", make_prompt(9))
    core.add(request)
    free_during_step: list[int] = []

    def abort_in_flight() -> None:
        assert core.abort(request.request_id)
        core.check_integrity()
        free_during_step.append(core.load().free_blocks)
        core.add(make_request("r", make_prompt(9)))  # the same id may come back at once

    model.before_forward = abort_in_flight
    output = core.step()
    assert output is not None
    assert output.updates == ()
    assert free_during_step == [core.load().num_blocks - 3]
    assert core.abort(request.request_id)
    Driver(core).settle()
    assert core.load().free_blocks == core.load().num_blocks
    core.add(request)
    assert Driver(core).run()["r"].token_ids == alone(request).token_ids
