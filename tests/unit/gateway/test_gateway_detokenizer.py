"""Characters split over tokens, and what a prompt may and may not leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.common.model_files import locate_model
from isthmus.gateway.detokenizer import Detokenizer
from isthmus.gateway.tokenizer import TextTokenizer, load_tokenizer
from tests.support.tiny_tokenizer import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"))
    return load_tokenizer(locate_model(str(folder)))


def byte_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    return [tokenizer.token_bytes.index(bytes([byte])) for byte in data]


def test_a_split_character_comes_when_it_is_whole(tiny: TextTokenizer) -> None:
    detokenizer = Detokenizer(tiny)
    deltas = [detokenizer.push([i]) for i in byte_ids(tiny, "a😀é".encode())]
    assert deltas == ["a", "", "", "", "😀", "", "é"]


def test_bytes_that_are_no_text_become_one_replacement(tiny: TextTokenizer) -> None:
    detokenizer = Detokenizer(tiny)
    assert detokenizer.push(byte_ids(tiny, b"a\xffb")) == "a\ufffdb"


def test_a_character_cut_off_by_the_end_is_not_shown(tiny: TextTokenizer) -> None:
    assert Detokenizer(tiny).push(byte_ids(tiny, "a안".encode()[:-1])) == "a"


def test_special_tokens_and_ids_beyond_the_vocabulary_hide(tiny: TextTokenizer) -> None:
    ids = [1, *byte_ids(tiny, b"a"), 2, tiny.vocab_size + 5]
    assert Detokenizer(tiny).push(ids) == "a"


def test_output_finishes_a_character_that_the_prompt_began(tiny: TextTokenizer) -> None:
    data = "secret 안".encode()
    prompt, output = byte_ids(tiny, data[:-1]), byte_ids(tiny, data[-1:] + b"!")
    detokenizer = Detokenizer(tiny, prompt)
    assert [detokenizer.push([i]) for i in output] == ["안", "!"]


@pytest.mark.parametrize("output", [b"hello", b" 1", "é".encode()])
def test_a_prompt_that_ends_inside_a_character_leaves_no_trace(
    tiny: TextTokenizer, output: bytes
) -> None:
    prompt = byte_ids(tiny, "secret 안".encode()[:-1])
    detokenizer = Detokenizer(tiny, prompt)
    text = "".join(detokenizer.push([i]) for i in byte_ids(tiny, output))
    assert text == output.decode()


def test_time_per_token_does_not_grow_with_the_text(tiny: TextTokenizer) -> None:
    """State is a decoder's few pending bytes, whatever went through."""
    detokenizer = Detokenizer(tiny)
    for _ in range(10_000):
        detokenizer.push(byte_ids(tiny, b"a"))
    held = [getattr(detokenizer, name) for name in ("_bytes", "_hidden", "_is_seeded")]
    assert held == [tiny.token_bytes, tiny.special_token_ids, False]
    assert detokenizer._decoder is None or not detokenizer._decoder.getstate()[0]
