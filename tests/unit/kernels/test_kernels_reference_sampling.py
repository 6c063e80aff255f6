"""The batch ops of sampling against the engine's sampler, which takes one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.types import SamplingParams
from isthmus.engine.sampler import describe_token
from isthmus.kernels import reference
from isthmus.kernels.tolerances import assert_close
from isthmus.kernels.types import Penalties, SamplingRows
from tests.support.sampling_rows import SamplingCase, sampling_cases


@settings(max_examples=100, deadline=None)
@given(case=sampling_cases(most_rows=3, most_tokens=600))
def test_draws_are_those_of_the_engines_sampler(case: SamplingCase) -> None:
    ids, is_usable = reference.draw_tokens(torch.from_numpy(case.logits), case.rows())
    assert is_usable.all()
    for row, token_id in enumerate(ids.tolist()):
        assert token_id in case.right_tokens(row)


def rows_of(*params: SamplingParams, draw: float = 0.0) -> SamplingRows:
    return SamplingCase(np.empty((0, 0), np.float32), list(params), [draw] * len(params)).rows()


def test_equal_weights_are_drawn_in_order_of_ids() -> None:
    logits = torch.zeros(4, 8)
    uniforms = torch.tensor([0.0, 0.124, 0.126, 0.999], dtype=torch.float64)
    rows = SamplingRows(
        torch.ones(4), torch.zeros(4).int(), torch.ones(4).double(), torch.zeros(4), uniforms
    )
    assert reference.draw_tokens(logits, rows)[0].tolist() == [0, 0, 1, 7]


def test_filters_prefer_the_lower_id_among_equals() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).expand(2, 5)
    rows = rows_of(SamplingParams(top_k=2), SamplingParams(top_p=0.2), draw=0.999)
    assert reference.draw_tokens(logits, rows)[0].tolist() == [2, 1]


def test_greedy_takes_the_lowest_id_and_ignores_the_draw() -> None:
    rows = rows_of(SamplingParams(temperature=0.0, top_k=3), draw=0.9)
    ids, _ = reference.draw_tokens(torch.tensor([[0.0, 5.0, 5.0]]), rows)
    assert ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_usable_number_says_so_and_spares_the_others(temperature: float) -> None:
    bad = [[torch.nan, 1.0], [-torch.inf, -torch.inf], [torch.inf, 1.0], [0.0, 1.0]]
    rows = rows_of(*[SamplingParams(temperature=temperature)] * 4, draw=0.99)
    ids, is_usable = reference.draw_tokens(torch.tensor(bad), rows)
    assert is_usable.tolist() == [False, False, False, True]
    assert ids.tolist() == [0, 0, 0, 1]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(1, 300), num_top=st.integers(0, 20))
def test_descriptions_are_those_of_the_engines_sampler(
    seed: int, vocab_size: int, num_top: int
) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 5, (2, vocab_size)).round(1).astype(np.float32)
    logits[random.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = -0.0
    token_ids = random.integers(vocab_size, size=2)
    scores = reference.describe_tokens(
        torch.from_numpy(logits), torch.from_numpy(token_ids), num_top
    )
    for row in range(2):
        expected = describe_token(logits[row], int(token_ids[row]), num_top)
        assert scores.ranks[row] == expected.rank
        assert scores.top_ids[row].tolist() == [token_id for token_id, _ in expected.top]
        found = torch.cat((scores.logprobs[row, None], scores.top_logprobs[row]))
        wanted = torch.tensor([expected.logprob, *(value for _, value in expected.top)])
        assert_close("describe_tokens", found, wanted)


def test_adjusting_biases_then_penalises_then_masks() -> None:
    # Tokens:          0    1     2     3     4     5      6
    logits = torch.tensor([[1.0, 2.0, -2.0, 4.0, 0.5, 3.0, 100.0]])
    penalties = Penalties(
        output_counts=torch.tensor([[0] * 7, [0, 2, 1, 0, 0, 0, 0]], dtype=torch.int32),
        is_in_prompt=torch.tensor([[True] * 7, [False, True, False, True, False, False, False]]),
        table_rows=torch.tensor([1]),
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.25]),
        frequency=torch.tensor([0.125]),
    )
    reference.adjust_logits(
        logits,
        bias_ids=torch.tensor([[4, 1, 5, -1]]),
        biases=torch.tensor([[1.5, 4.0, -torch.inf, 9.0]]),
        penalties=penalties,
        bitmask=torch.tensor([[0b0111111]], dtype=torch.int32),
    )
    expected = [1.0, (2 + 4) / 2 - 0.25 - 0.25, -2 * 2 - 0.25 - 0.125, 2.0, 2.0]
    assert logits.tolist() == [[*expected, -torch.inf, -torch.inf]]


def test_the_last_bit_of_a_mask_word_is_a_bit_like_the_others() -> None:
    logits = torch.zeros(1, 40)
    bitmask = torch.tensor([[-(2**31), 0b100]], dtype=torch.int32)  # tokens 31 and 34
    reference.adjust_logits(logits, bitmask=bitmask)
    assert torch.isfinite(logits).nonzero()[:, 1].tolist() == [31, 34]
