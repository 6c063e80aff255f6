"""Stop tokens, stop strings and lengths: what of a sequence is text."""

from __future__ import annotations

import pytest

from isthmus.common.model_files import locate_model
from isthmus.common.types import SamplingParams
from isthmus.gateway.output_text import OutputText
from isthmus.gateway.tokenizer import TextTokenizer, load_tokenizer
from tests.support.tiny_tokenizer import write_tiny_model

STOP = 3 + ord("!")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(locate_model(str(write_tiny_model(tmp_path_factory.mktemp("model")))))


def play(
    tiny: TextTokenizer, text: str, stops: tuple[str, ...] = (), min_tokens: int = 0
) -> tuple[OutputText, list[str]]:
    sampling = SamplingParams(stop_token_ids=(STOP,), min_tokens=min_tokens)
    output = OutputText(tiny, (), stops, sampling)
    shown = []
    for byte in text.encode():
        shown.append(output.push(3 + byte))
        if output.matched_stop is not None:
            break
    return output, shown


def test_a_stop_token_that_ends_the_sequence_is_no_text(tiny: TextTokenizer) -> None:
    output, shown = play(tiny, "ab!")
    assert output.ends_in_stop_token
    assert "".join(shown) + output.finish(by_stop_token=True) == "ab"
    assert output.num_tokens == 3


def test_a_stop_token_the_sequence_goes_on_behind_is_text(tiny: TextTokenizer) -> None:
    output, shown = play(tiny, "a!b", min_tokens=2)
    assert shown == ["a", "", "!b"]
    assert not output.ends_in_stop_token


def test_a_stop_token_cut_off_by_the_length_is_text(tiny: TextTokenizer) -> None:
    output, _ = play(tiny, "a!", min_tokens=2)
    assert not output.ends_in_stop_token
    assert output.finish(by_stop_token=False) == "!"


def test_a_stop_string_that_a_held_stop_token_completes(tiny: TextTokenizer) -> None:
    """The token behind it belongs to nobody: it is neither shown nor counted."""
    output, shown = play(tiny, "ab!cd", stops=("b!",))
    assert "".join(shown) == "a"
    assert output.matched_stop == "b!"
    assert output.num_tokens == 3
    assert output.finish(by_stop_token=False) == ""


def test_stop_strings_are_not_looked_for_before_min_tokens(tiny: TextTokenizer) -> None:
    output, shown = play(tiny, "ababab", stops=("ab",), min_tokens=3)
    assert "".join(shown) == "abab"
    assert output.matched_stop == "ab"
