"""What the comparison of a canary says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.common.ids import InstanceId
from isthmus.common.types import InstanceRef, TokenLogprob
from isthmus.decode_worker.canary import Canary, CanaryResult, Served, compare
from tests.support.engine_driver import make_prompt, make_request

SOURCE = InstanceRef(InstanceId("prefill-0"), 1, "127.0.0.1:1")


def sure(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.01, 0, ((token_id, -0.01), (99, -5.0)))


def torn(token_id: int, other: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.70, 0, ((token_id, -0.70), (other, -0.72)))


@pytest.mark.parametrize(
    ("served", "computed", "result", "place"),
    [
        ([1, 2, 3], [1, 2, 3], CanaryResult.EQUAL, 3),
        ([1, 9, 3], [1, 2, 3], CanaryResult.MISMATCH, 1),
        ([1, 99, 3], [1, 2, 3], CanaryResult.MISMATCH, 1),  # an alternative, but a bad one
        ([1, 2], [1, 2, 3], CanaryResult.MISMATCH, 2),
        ([1, 2, 3], [1, 2], CanaryResult.MISMATCH, 2),
    ],
)
def test_the_first_difference_counts(
    served: list[int], computed: list[int], result: CanaryResult, place: int
) -> None:
    assert compare(served, computed, [sure(token) for token in computed]) == (result, place)


def test_a_choice_between_equals_is_no_mismatch() -> None:
    logprobs = [sure(1), torn(2, 7), sure(3)]
    assert compare([1, 7, 8], [1, 2, 3], logprobs) == (CanaryResult.NEAR_TIE, 1)
    assert compare([1, 6, 8], [1, 2, 3], logprobs) == (CanaryResult.MISMATCH, 1)


def test_only_whole_greedy_requests_can_be_compared() -> None:
    greedy = make_request("r", make_prompt(9), max_tokens=4, temperature=0.0)
    assert Served(greedy, (5,), SOURCE).can_be_compared
    assert not Served(greedy, (), SOURCE).can_be_compared
    assert not Served(replace(greedy, num_resumed_tokens=1), (5,), SOURCE).can_be_compared
    sampled = make_request("r", make_prompt(9), max_tokens=4, temperature=1.0)
    assert not Served(sampled, (5,), SOURCE).can_be_compared


@pytest.mark.parametrize(
    ("theirs", "counted"), [("int8", []), ("bfloat16", ["skipped"]), (None, ["skipped"])]
)
def test_a_prompt_over_kv_of_another_dtype_is_skipped(
    theirs: str | None, counted: list[str]
) -> None:
    """Attention over quantised KV differs by more than a near tie: no mismatch, no alarm."""
    results: list[str] = []
    layout = None if theirs is None else SimpleNamespace(dtype=theirs)
    runtime: Any = SimpleNamespace(
        config=SimpleNamespace(transfer=SimpleNamespace(canary_every=1)),
        transfers=SimpleNamespace(layout_of=lambda _: layout),
        engine=SimpleNamespace(kv_layout=SimpleNamespace(dtype="int8")),
        metrics=SimpleNamespace(canary=results.append),
    )
    canary = Canary(runtime)
    canary.served(Served(make_request("r", make_prompt(9), temperature=0.0), (5,), SOURCE))
    assert results == counted
    assert (canary._waiting is None) == bool(counted)
