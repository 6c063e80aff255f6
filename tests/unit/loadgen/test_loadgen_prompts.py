from __future__ import annotations

import pytest

from isthmus.common.errors import ConfigError
from isthmus.loadgen.prompts import PromptMaker
from isthmus.workload import Call


def test_ids_are_below_the_vocabulary_and_no_special_tokens() -> None:
    prompt = PromptMaker(seed=1, vocab=102).prompt(Call(0, 0.0, 50, 1))
    assert set(prompt) == {100, 101}


def test_another_run_finds_nothing_of_the_last_one_in_a_cache() -> None:
    call = Call(0, 0.0, 16, 1, blocks=(1, 2))
    first, second = (
        PromptMaker(1, vocab=1_000, block_tokens=8, run=run).prompt(call) for run in (0, 1)
    )
    assert first[:8] != second[:8]


def test_a_vocabulary_of_special_tokens_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="only ids from 100 on"):
        PromptMaker(seed=1, vocab=100)
