"""What length nearly all answers have at least."""

from __future__ import annotations

from isthmus.common.answer_lengths import ENOUGH, SHORTER, WINDOW, AnswerLengths


def test_nothing_is_counted_on_before_enough_answers_are_known() -> None:
    lengths = AnswerLengths()
    for _ in range(ENOUGH - 1):
        lengths.observe(50)
    assert lengths.least == 0
    lengths.observe(50)
    assert lengths.least == 50


def test_few_are_shorter_than_what_is_counted_on() -> None:
    lengths = AnswerLengths()
    answers = [1 + (7 * number) % WINDOW for number in range(WINDOW)]
    for num_tokens in answers:
        lengths.observe(num_tokens)
    shorter = sum(num_tokens < lengths.least for num_tokens in answers)
    assert shorter == SHORTER * WINDOW


def test_old_answers_are_forgotten() -> None:
    lengths = AnswerLengths()
    for num_tokens in [2] * WINDOW + [30] * WINDOW:
        lengths.observe(num_tokens)
    assert lengths.least == 30
