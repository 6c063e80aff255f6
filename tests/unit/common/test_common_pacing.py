"""How long a step may take beside sequences that decode, and the prompts that fit into it."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.pacing import (
    LEAST_SHARE,
    LENT,
    LONGEST_GAP,
    PACE,
    ChunkBudget,
    longest_step_ms,
    tokens_within,
)

TARGET = 100.0
PLENTY = 1_000


def test_a_sequence_on_time_lets_a_step_take_its_pace() -> None:
    limit = longest_step_ms(TARGET, 5, 4 * PACE * TARGET, PLENTY, step_ms=20.0, num_likely=0)
    assert limit == pytest.approx(PACE * TARGET)


def test_a_sequence_ahead_lends_what_it_has_gained() -> None:
    ahead = longest_step_ms(TARGET, 3, 2 * PACE * TARGET - 40.0, PLENTY, step_ms=20.0, num_likely=0)
    assert ahead == pytest.approx(PACE * TARGET + 40.0)


def test_no_gap_is_longer_than_a_few_targets() -> None:
    limit = longest_step_ms(TARGET, 500, 500 * 20.0, PLENTY, step_ms=20.0, num_likely=0)
    assert limit == LONGEST_GAP * TARGET


def test_a_sequence_behind_takes_back_half_of_what_it_could() -> None:
    limit = longest_step_ms(TARGET, 3, 5 * TARGET, PLENTY, step_ms=20.0, num_likely=0)
    assert limit == pytest.approx((PACE * TARGET + 20.0) / 2)


def test_prompts_have_their_share_where_decodes_need_all_of_the_pace() -> None:
    limit = longest_step_ms(TARGET, 2, PACE * TARGET, PLENTY, step_ms=PACE * TARGET, num_likely=0)
    assert limit == pytest.approx(PACE * TARGET * (1 + LEAST_SHARE))


def test_a_sequence_whose_target_is_lost_limits_nothing() -> None:
    # Ten tokens at 20 ms cannot make up for a second.
    assert longest_step_ms(TARGET, 2, 2_000.0, 10, step_ms=20.0, num_likely=0) == inf
    assert longest_step_ms(TARGET, 2, 2_000.0, PLENTY, step_ms=20.0, num_likely=0) < inf


def test_a_sequence_lends_what_it_can_take_back_before_its_answer_may_end() -> None:
    def limit(num_tokens: int, num_likely: int) -> float:
        age_ms = (num_tokens - 1) * PACE * TARGET
        return longest_step_ms(TARGET, num_tokens, age_ms, PLENTY, 20.0, num_likely)

    taken_back = (PACE * TARGET - 20.0) / 2  # a token, while it catches up
    assert limit(1, 6) == pytest.approx(PACE * TARGET + LENT * 5 * taken_back)
    assert limit(5, 6) == pytest.approx(PACE * TARGET + LENT * taken_back)
    assert limit(6, 6) == limit(7, 6) == pytest.approx(PACE * TARGET)
    assert limit(1, 1_000) == LONGEST_GAP * TARGET


def test_what_was_lent_is_made_up_for_before_the_answer_may_end() -> None:
    num_likely, step_ms, age_ms = 12, 20.0, 0.0
    for num_tokens in range(1, num_likely + 1):  # there are always prompts to fill a step with
        age_ms += longest_step_ms(TARGET, num_tokens, age_ms, PLENTY, step_ms, num_likely)
    assert age_ms <= TARGET * num_likely


@given(
    limit=st.floats(0.1, 1e4),
    token=st.floats(1e-3, 10.0),
    pair=st.floats(0.0, 1e-2),
    computed=st.integers(0, 100_000),
)
def test_tokens_take_as_long_as_was_given(
    limit: float, token: float, pair: float, computed: int
) -> None:
    count = tokens_within(limit, token, pair, computed)
    assert token * count + pair * (computed + count / 2) * count == pytest.approx(limit)


def test_a_budget_without_a_pace_is_one_of_tokens() -> None:
    budget = ChunkBudget(100)
    assert [budget.take(60, 0), budget.take(60, 0)] == [60, 40]
    assert budget.is_spent


def test_a_pace_limits_chunks_and_leaves_tokens_for_nobody() -> None:
    budget = ChunkBudget(1_000, left_ms=50.0, token_ms=2.0)
    assert budget.take(400, 0) == 25
    assert budget.is_spent
    assert budget.taken_ms == pytest.approx(50.0)


def test_the_first_prompt_of_a_step_has_a_token_however_little_time_there_is() -> None:
    budget = ChunkBudget(1_000, left_ms=0.0, token_ms=2.0)
    assert not budget.is_spent
    assert budget.take(400, 0) == 1
    assert budget.is_spent


def test_a_chunk_of_one_token_is_not_cut_short() -> None:
    budget = ChunkBudget(1_000, left_ms=0.0, token_ms=2.0)
    assert budget.take(1, 0) == 1
    assert not budget.is_cut
