"""What a step says that it computed: every prompt token once, every later token once."""

from __future__ import annotations

import pytest

from tests.support.engine_driver import make_prompt, make_request
from tests.support.tiny_model import make_tiny_core


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33])
def test_a_prompt_s_last_token_alone_is_prefill_not_decode(length: int) -> None:
    core = make_tiny_core(max_num_batched_tokens=16)
    core.add(make_request("a", make_prompt(length), max_tokens=4))
    steps = []
    while (output := core.step()) is not None:
        steps.append((output.num_prefill_tokens, output.num_decode_tokens))
    chunks = [16] * (length // 16) + ([length % 16] if length % 16 else [])
    assert steps == [(chunk, 0) for chunk in chunks] + [(0, 1)] * 3


def test_cached_tokens_are_not_counted_and_decodes_beside_them_are() -> None:
    core = make_tiny_core()
    core.add(make_request("a", make_prompt(17), max_tokens=6))
    first = core.step()
    assert first is not None
    core.add(make_request("b", make_prompt(17), max_tokens=2))  # four blocks of four are cached
    second = core.step()
    assert second is not None
    assert (first.num_prefill_tokens, first.num_decode_tokens) == (17, 0)
    assert (second.num_prefill_tokens, second.num_decode_tokens) == (1, 1)
