"""Tokens by known pieces are the backend's tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from isthmus.common.model_files import locate_model
from isthmus.gateway import piece_memory as module
from isthmus.gateway.gguf_tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT
from isthmus.gateway.piece_memory import PieceMemory, piece_memory
from isthmus.gateway.tokenizer import load_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|", "'s", "'LL", "  ", "\n\n", "\r\n", "\x1c", "1234", "!")


@pytest.fixture(scope="module")
def sample() -> Tokenizer:
    return load_tokenizer(locate_model("sample")).backend


def backend_with(sample: Tokenizer, split: str | None) -> Tokenizer:
    backend = Tokenizer.from_str(sample.to_str())
    if split is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return backend


def memory_of(backend: Tokenizer) -> PieceMemory | None:
    return piece_memory(backend, json.loads(backend.to_str()))


def ascii_texts(sample: Tokenizer, count: int) -> Iterator[str]:
    source = random.Random(5)
    single = [chr(code) for code in range(128)]
    words = [token.replace("Ġ", " ") for token in sample.get_vocab() if token[1:].isalpha()]
    for _ in range(count):
        kinds = source.choice([(single,), (words,), (single, words, MARKS), (words, MARKS)])
        yield "".join(source.choice(source.choice(kinds)) for _ in range(source.randint(0, 30)))


@pytest.mark.parametrize("split", [None, LLAMA3_SPLIT, QWEN2_SPLIT])
def test_tokens_are_those_of_the_backend(sample: Tokenizer, split: str | None) -> None:
    backend = backend_with(sample, split)
    memory = memory_of(backend)
    assert memory is not None
    for text in ascii_texts(sample, 3000):
        if text.isascii():
            expected = backend.encode(text, add_special_tokens=False).ids
            assert memory.encode(text) == expected, text


def test_longer_added_token_wins_over_one_it_begins_with(sample: Tokenizer) -> None:
    backend = backend_with(sample, None)
    backend.add_special_tokens(["<|im", "<|im_start|>x"])
    memory = memory_of(backend)
    assert memory is not None
    text = "a<|im_start|>xy<|im z<|im_start|>"
    assert memory.encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_pieces_are_forgotten_when_there_are_too_many(
    sample: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PIECES", 3)
    memory = memory_of(sample)
    assert memory is not None
    text = "one two three four five six one two"
    for _ in range(2):
        assert memory.encode(text) == sample.encode(text, add_special_tokens=False).ids


def test_other_texts_are_left_to_the_backend(sample: Tokenizer) -> None:
    memory = memory_of(sample)
    assert memory is not None
    assert memory.encode("naïve") is None
    assert memory.encode("a" * (module.MAX_TEXT + 1)) is None


def test_other_tokenizers_have_none(sample: Tokenizer) -> None:
    other_split = backend_with(sample, r"\p{Lu}|\s+|.")
    spaced = backend_with(sample, None)
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lowered = backend_with(sample, None)
    lowered.normalizer = normalizers.Lowercase()
    stripping = backend_with(sample, None)
    stripping.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    for backend in (other_split, spaced, lowered, stripping):
        assert memory_of(backend) is None


def test_normal_forms_change_no_ascii(sample: Tokenizer) -> None:
    backend = backend_with(sample, None)
    backend.normalizer = normalizers.Sequence([normalizers.NFC()])
    memory = memory_of(backend)
    assert memory is not None
    text = "A plain text, it's 12 words.\n"
    assert memory.encode(text) == backend.encode(text, add_special_tokens=False).ids
