"""Triton's sampling ops against the reference and the engine's sampler, interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from isthmus.common.types import SamplingParams
from isthmus.kernels import reference
from isthmus.kernels.tolerances import assert_close
from isthmus.kernels.triton import sampling
from isthmus.kernels.triton.logits import adjust_logits
from isthmus.kernels.types import Penalties
from tests.support.sampling_rows import SamplingCase, sampling_cases

pytestmark = pytest.mark.interpreted


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=12, deadline=None)
@given(case=sampling_cases(most_rows=2, most_tokens=600))
def test_draws_are_those_of_the_engines_sampler(case: SamplingCase) -> None:
    ids, is_usable = sampling.draw_tokens(torch.from_numpy(case.logits), case.rows())
    assert is_usable.all()
    for row, token_id in enumerate(ids.tolist()):
        assert token_id in case.right_tokens(row)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(top_p=0.95, min_p=0.01, temperature=0.7),
    ],
)
def test_rows_of_several_blocks_equal_the_reference(params: SamplingParams) -> None:
    logits = 3 * torch.randn(1, 9001, generator=generator(1))
    case = SamplingCase(logits.numpy(), [params], [0.83])
    expected = reference.draw_tokens(logits, case.rows())
    assert sampling.draw_tokens(logits, case.rows())[0].tolist() == expected[0].tolist()


def test_equals_across_blocks_are_kept_in_order_of_ids() -> None:
    logits = torch.zeros(1, 9001)
    for draw, expected in ((0.0, 0), (0.9999, 5999)):
        case = SamplingCase(logits.numpy(), [SamplingParams(top_k=6000)], [draw])
        assert sampling.draw_tokens(logits, case.rows())[0].item() == expected


@pytest.mark.parametrize("top_k", [0, 4000])
def test_what_is_kept_may_reach_beyond_the_likely_tokens(top_k: int) -> None:
    # One token of weight 1 and 4999 of 0.00005, which is a fifth of all.
    logits = torch.full((1, 5000), -10.0)
    logits[0, 2500] = 0.0
    params = SamplingParams(top_k=top_k, top_p=0.95)
    for draw in (0.1, 0.5, 0.9999):
        case = SamplingCase(logits.numpy(), [params], [draw])
        assert sampling.draw_tokens(logits, case.rows())[0].item() in case.right_tokens(0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_usable_number_says_so_and_spares_the_others(temperature: float) -> None:
    bad = [[torch.nan, 1.0], [-torch.inf, -torch.inf], [torch.inf, 1.0], [0.0, 1.0]]
    case = SamplingCase(torch.tensor(bad).numpy(), [SamplingParams(temperature)] * 4, [0.99] * 4)
    ids, is_usable = sampling.draw_tokens(torch.tensor(bad), case.rows())
    assert is_usable.tolist() == [False, False, False, True]
    assert ids.tolist() == [0, 0, 0, 1]


def test_a_rows_token_does_not_depend_on_the_others() -> None:
    logits = torch.randn(5, 700, generator=generator(2))
    params = [SamplingParams(top_p=0.8, top_k=100), SamplingParams(temperature=0.0)] * 2
    case = SamplingCase(logits.numpy(), [*params, SamplingParams()], [0.1, 0.3, 0.5, 0.7, 0.9])
    together = sampling.draw_tokens(logits, case.rows())[0].tolist()
    for row in range(5):
        alone = SamplingCase(case.logits[[row]], [case.params[row]], [case.draws[row]])
        assert sampling.draw_tokens(logits[[row]], alone.rows())[0].tolist() == [together[row]]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 3),
    vocab_size=st.integers(1, 1500),
    has_penalties=st.booleans(),
    has_bitmask=st.booleans(),
)
def test_adjusted_logits_are_the_bits_of_the_reference(
    seed: int, num_rows: int, vocab_size: int, has_penalties: bool, has_bitmask: bool
) -> None:
    made = generator(seed)
    logits = 5 * torch.randn(num_rows, vocab_size, generator=made)
    logits[torch.rand(logits.shape, generator=made) < 0.1] = -torch.inf
    counts = torch.randint(-4, 4, (4, vocab_size), generator=made, dtype=torch.int32).clamp(min=0)
    penalties = Penalties(
        output_counts=counts,
        is_in_prompt=torch.rand(4, vocab_size, generator=made) < 0.3,
        table_rows=torch.randint(0, 4, (num_rows,), generator=made),
        repetition=0.5 + torch.rand(num_rows, generator=made),
        presence=torch.randn(num_rows, generator=made),
        frequency=torch.randn(num_rows, generator=made).round(),
    )
    words = (num_rows, -(-vocab_size // 32))
    arguments = {
        "bias_ids": torch.randint(-1, vocab_size, (num_rows, 1), generator=made),
        "biases": torch.randn(num_rows, 1, generator=made),
        "penalties": penalties if has_penalties else None,
        "bitmask": torch.randint(-(2**31), 2**31, words, generator=made, dtype=torch.int32)
        if has_bitmask
        else None,
    }
    actual, expected = logits.clone(), logits.clone()
    adjust_logits(actual, **arguments)
    reference.adjust_logits(expected, **arguments)
    assert torch.equal(actual, expected)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(1, 1500), num_top=st.integers(0, 20))
def test_descriptions_equal_the_reference(seed: int, vocab_size: int, num_top: int) -> None:
    made = generator(seed)
    logits = (5 * torch.randn(2, vocab_size, generator=made)).round(decimals=1)
    token_ids = torch.randint(0, vocab_size, (2,), generator=made)
    actual = sampling.describe_tokens(logits, token_ids, num_top)
    expected = reference.describe_tokens(logits, token_ids, num_top)
    assert torch.equal(actual.ranks, expected.ranks)
    assert torch.equal(actual.top_ids, expected.top_ids)
    assert_close("describe_tokens", actual.logprobs, expected.logprobs)
    assert_close("describe_tokens", actual.top_logprobs, expected.top_logprobs)
