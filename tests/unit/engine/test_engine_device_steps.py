"""Steps that run behind the host give what steps in the engine thread give, token for token."""

from __future__ import annotations

import pytest

from isthmus.common.errors import InternalError
from isthmus.common.ids import RequestId
from isthmus.common.types import FinishReason, Request
from isthmus.engine.core import EngineCore
from isthmus.engine.types import SequenceMode
from tests.support.device_core import make_device_core
from tests.support.engine_driver import (
    Driver,
    Outcome,
    copy_blocks,
    generate,
    make_prompt,
    make_request,
)
from tests.support.tiny_model import TinyModel, make_tiny_core

SAMPLING: list[dict[str, object]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"temperature": 1.2, "top_k": 12, "min_p": 0.02, "seed": 2**63},
    {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.6},
    {"temperature": 1.0, "seed": 9, "logit_bias": ((7, 3.0), (9, -2.0), (7, 1.0))},
    {"temperature": 1.0, "seed": 4, "logprobs": 3},
    {"temperature": 1e-60, "seed": 6},  # below what float32 holds: still a draw
    {"logprobs": 0, "repetition_penalty": 1.2},
]


def workload(max_tokens: int = 10) -> list[Request]:
    """A request of every kind of sampling; some of them stop at tokens that come."""
    requests = [
        make_request(f"r{i}", make_prompt(3 + 4 * i, salt=i), max_tokens=max_tokens + i, **sampling)
        for i, sampling in enumerate(SAMPLING)
    ]
    alone = generate(make_tiny_core(), *requests)
    stops = [
        make_request(
            f"stop{i}",
            request.token_ids,
            max_tokens=max_tokens + 5,
            min_tokens=2 * (i % 2),
            stop_token_ids=(alone[i].token_ids[3], 0, 999),
            **SAMPLING[i],
        )
        for i, request in enumerate(requests)
    ]
    return [*requests, *stops]


def told(outcome: Outcome) -> tuple[object, ...]:
    return (
        outcome.token_ids,
        outcome.finish_reason,
        [(p.token_id, p.rank, [i for i, _ in p.top]) for p in outcome.logprobs],
        [(p.token_id, p.rank, [i for i, _ in p.top]) for p in outcome.prompt_logprobs],
    )


def assert_same(core: EngineCore, requests: list[Request], **engine: object) -> None:
    expected = generate(make_tiny_core(async_scheduling="off", **engine), *requests)
    actual = generate(core, *requests)
    for request, mine, theirs in zip(requests, actual, expected, strict=True):
        assert told(mine) == told(theirs), request.request_id
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
    core.check_integrity()
    assert core.load().free_blocks == core.load().num_blocks


@pytest.mark.parametrize(("async_scheduling", "cuda_graphs"), [("on", True), ("off", False)])
@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 64, "max_num_seqs": 16},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"max_num_batched_tokens": 24, "num_blocks": 26},  # sequences are preempted
    ],
)
def test_any_mixture_of_sampling_gives_the_same_tokens(
    engine: dict[str, object], cuda_graphs: bool, async_scheduling: str
) -> None:
    core = make_device_core(cuda_graphs=cuda_graphs, async_scheduling=async_scheduling, **engine)
    assert_same(core, workload(), **engine)


def test_steps_of_the_cpu_may_be_planned_ahead_as_well() -> None:
    assert_same(make_tiny_core(async_scheduling="on"), workload())


def test_prompt_logprobs_come_from_the_device() -> None:
    requests = [
        make_request("chunks", make_prompt(18), prompt_logprobs=2, logprobs=1),
        make_request("other", make_prompt(5, salt=2), prompt_logprobs=0, logit_bias=((3, 9.0),)),
        make_request("plain", make_prompt(9, salt=3)),
    ]
    assert_same(make_device_core(max_num_batched_tokens=7), requests, max_num_batched_tokens=7)


def test_more_alternatives_than_usual_get_room() -> None:
    requests = [make_request(f"r{i}", make_prompt(4, salt=i), logprobs=50) for i in range(3)]
    assert_same(make_device_core(max_num_seqs=3), requests)


def test_decode_steps_are_replayed_and_chunks_are_not() -> None:
    model = TinyModel()
    core = make_device_core(model, max_num_seqs=4, max_num_batched_tokens=8)
    assert model.forward_sizes == [4, 2, 1]  # captured, the largest first
    model.forward_sizes.clear()
    generate(core, make_request("r", make_prompt(11), max_tokens=4))
    assert model.forward_sizes == [8, 3, 1, 1, 1]
    model.forward_sizes.clear()
    generate(core, *(make_request(f"r{i}", make_prompt(2, salt=i), max_tokens=3) for i in range(3)))
    assert model.forward_sizes == [6, 4, 4]  # three sequences in the graph of four


def test_host_hears_of_a_step_when_the_next_one_is_launched() -> None:
    """The device's step is over before the host enters it: the one behind is launched first."""
    model = TinyModel()
    core = make_device_core(model, cuda_graphs=False)
    core.add(make_request("r", make_prompt(5), max_tokens=4))
    launched_at_step = []
    while core.step() is not None:
        launched_at_step.append(len(model.forward_sizes))
    assert launched_at_step == [2, 3, 4, 4]


def test_stop_makes_the_step_behind_it_void_and_its_blocks_wait_for_it() -> None:
    (whole,) = generate(make_tiny_core(), make_request("r", make_prompt(7)))
    stop = whole.token_ids[2]
    end = whole.token_ids.index(stop)
    model = TinyModel()
    core = make_device_core(model, cuda_graphs=False)
    core.add(make_request("r", make_prompt(7), stop_token_ids=(stop,)))
    driver = Driver(core)
    while driver.step():
        if driver.outcomes["r"].finish_reason is not None:
            break
    assert driver.outcomes["r"].finish_reason is FinishReason.STOP
    assert driver.outcomes["r"].token_ids == whole.token_ids[: end + 1]
    assert len(model.forward_sizes) == end + 2  # one for nothing
    assert core.load().free_blocks < core.load().num_blocks
    driver.settle()
    assert core.load().free_blocks == core.load().num_blocks


def test_length_is_known_ahead_and_nothing_is_computed_for_nothing() -> None:
    model = TinyModel()
    core = make_device_core(model, cuda_graphs=False)
    generate(core, make_request("r", make_prompt(7), max_tokens=5))
    assert len(model.forward_sizes) == 5
    core.add(make_request("p", make_prompt(7, salt=1)), SequenceMode.PREFILL_ONLY)
    Driver(core).run()
    assert len(model.forward_sizes) == 6
    core.release_hold(RequestId("p"))
    core.check_integrity()


def test_abort_and_return_while_steps_are_in_flight() -> None:
    core = make_device_core(max_num_seqs=4)
    request = make_request("r", make_prompt(9), **SAMPLING[3])
    other = make_request("other", make_prompt(6, salt=1), **SAMPLING[4])
    core.add(request)
    core.add(other)
    driver = Driver(core)
    for _ in range(3):
        driver.step()
    assert core.abort(request.request_id)
    core.add(request)
    del driver.outcomes["r"]
    outcomes = driver.run()
    for expected in generate(make_tiny_core(), request, other):
        name = expected.updates[0].request_id
        assert outcomes[name].token_ids == expected.token_ids
    assert core.load().free_blocks == core.load().num_blocks


def test_transferred_prompt_goes_on_behind_the_host() -> None:
    request = make_request("r", make_prompt(14), max_tokens=9, **SAMPLING[3])
    (expected,) = generate(make_tiny_core(), request)
    source, target = make_device_core(), make_device_core()
    reservation = target.reserve(request)
    source.add(request, SequenceMode.PREFILL_ONLY)
    first = Driver(source).run()["r"].token_ids[0]
    source_ids = source.block_table(request.request_id)
    copy_blocks(source, source_ids, target, reservation.block_ids)
    source.release_hold(request.request_id)
    target.admit_with_kv(reservation, request, first)
    outcome = Driver(target).run()["r"]
    assert [first, *outcome.token_ids] == expected.token_ids


def test_row_of_nan_fails_its_sequence_alone() -> None:
    model = TinyModel()
    model.poison_token = 63
    core = make_device_core(model)
    bad, good = make_request("bad", (1, 2, 63)), make_request("good", (1, 2, 3), max_tokens=3)
    outcomes = generate(core, bad, good)
    assert isinstance(outcomes[0].updates[-1].error, InternalError)
    assert outcomes[1].token_ids == generate(make_tiny_core(), good)[0].token_ids


def test_failed_launch_ends_its_sequences_and_the_next_one_is_sound() -> None:
    model = TinyModel()
    core = make_device_core(model, cuda_graphs=False, max_num_seqs=2)
    requests = [make_request(f"r{i}", make_prompt(6, salt=i), max_tokens=5) for i in range(3)]
    for request in requests:
        core.add(request)
    driver = Driver(core)
    driver.step()
    model.fail_next = 1
    outcomes = driver.run()
    assert [outcomes[r.request_id].finish_reason for r in requests[:2]] == [FinishReason.ERROR] * 2
    (expected,) = generate(make_tiny_core(), requests[2])
    assert outcomes["r2"].token_ids == expected.token_ids
    assert core.load().free_blocks == core.load().num_blocks


def test_more_sequences_with_penalties_than_rows_come_and_go() -> None:
    requests = [
        make_request(f"r{i}", make_prompt(4 + i, salt=i), max_tokens=3 + i % 4, **SAMPLING[3])
        for i in range(11)
    ]
    assert_same(make_device_core(max_num_seqs=3), requests)
