from __future__ import annotations

import pytest

from isthmus.common import errors
from isthmus.common.types import Remedy
from isthmus.decode_worker.fallback import can_fall_back, has_time, remedy_for, resumed
from tests.support.engine_driver import make_prompt, make_request

REQUEST = make_request("r", make_prompt(9), max_tokens=8, prompt_logprobs=1)


@pytest.mark.parametrize(
    "error",
    [
        errors.InstanceLostError("x"),
        errors.StaleEpochError("x"),
        errors.DrainingError("x"),
        errors.TransferError("x"),
        errors.TransferTimeoutError("x"),
        errors.HandshakeError("x"),
        errors.LayoutMismatchError("x"),
        errors.OutOfBlocksError("x"),
        errors.InternalError("x"),
        errors.CancelledError("the transfer was ended"),
        errors.DeadlineError("of the ticket"),
    ],
)
def test_faults_of_a_peer_are_made_good_here(error: errors.IsthmusError) -> None:
    assert can_fall_back(error)


@pytest.mark.parametrize(
    "error",
    [errors.ContextLengthError("x"), errors.ModelNotFoundError("x")],
)
def test_faults_of_the_request_are_final(error: errors.IsthmusError) -> None:
    assert not can_fall_back(error)


@pytest.mark.parametrize(
    ("policy", "can_reprefill", "remedy"),
    [
        (Remedy.FAIL, True, Remedy.FAIL),
        (Remedy.REPREFILL, True, Remedy.REPREFILL),
        (Remedy.REPREFILL, False, Remedy.RECOMPUTE),
        (Remedy.RECOMPUTE, True, Remedy.RECOMPUTE),
    ],
)
def test_the_operator_chooses_the_remedy(
    policy: Remedy, can_reprefill: bool, remedy: Remedy
) -> None:
    assert remedy_for(policy, can_reprefill) is remedy


def test_another_attempt_must_leave_time_for_computing_here() -> None:
    second = 1_000_000_000
    assert has_time(0, 3 * second, predicted_ttft_ms=1_400)
    assert not has_time(0, 3 * second, predicted_ttft_ms=1_500)
    assert not has_time(second, 3 * second, predicted_ttft_ms=1_000)


def test_delivered_tokens_become_the_tail_of_the_prompt() -> None:
    again = resumed(REQUEST, (5, 6))
    assert again.token_ids == (*REQUEST.token_ids, 5, 6)
    assert again.num_resumed_tokens == 2
    assert again.num_prompt_tokens == REQUEST.num_prompt_tokens
    assert again.sampling.prompt_logprobs is None
    assert again.sampling.max_tokens == REQUEST.sampling.max_tokens
    assert resumed(again, (7,)).num_resumed_tokens == 3


def test_a_request_without_tokens_delivered_stays_itself() -> None:
    assert resumed(REQUEST, ()) is REQUEST
