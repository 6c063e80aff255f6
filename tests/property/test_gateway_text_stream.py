"""The text of a stream does not depend on how it was cut: detokeniser and stop scanner."""

from __future__ import annotations

from functools import lru_cache

import hypothesis.strategies as st
from hypothesis import given, settings

from isthmus.gateway.detokenizer import Detokenizer
from isthmus.gateway.gguf_tokenizer import byte_alphabet
from isthmus.gateway.stop import StopScanner
from isthmus.gateway.tokenizer import TextTokenizer
from tests.support.tiny_tokenizer import build_tiny_backend


@lru_cache
def tiny() -> TextTokenizer:
    backend = build_tiny_backend()
    vocab = backend.get_vocab()
    alphabet = byte_alphabet()
    table = [b""] * len(vocab)
    for token, index in vocab.items():
        table[index] = token.encode() if index < 3 else bytes(alphabet[c] for c in token)
    return TextTokenizer(backend, len(vocab), tuple(table), frozenset({0, 1, 2}), (2,))


@given(st.text(max_size=40), st.data())
@settings(deadline=None)
def test_joined_deltas_are_the_text(text: str, data: st.DataObject) -> None:
    ids = tiny().encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tiny())
    deltas = []
    position = 0
    while position < len(ids):
        size = data.draw(st.integers(1, 5))
        deltas.append(detokenizer.push(ids[position : position + size]))
        position += size
    expected = tiny().decode(ids)
    assert "".join(deltas) == expected
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")


@given(st.lists(st.integers(0, 268), max_size=40))
@settings(deadline=None)
def test_any_tokens_decode_as_a_whole_does(ids: list[int]) -> None:
    detokenizer = Detokenizer(tiny())
    joined = "".join(detokenizer.push([token]) for token in ids)
    data = b"".join(tiny().token_bytes[i] for i in ids if i > 2)
    # Up to three bytes at the end may still become a character; no more is ever held back.
    ends = [data[: len(data) - held].decode(errors="replace") for held in range(4)]
    assert joined in ends
    assert joined == ends[0] or "\ufffd" in ends[0][-3:]


@given(st.binary(max_size=12), st.text(min_size=1, max_size=12))
@settings(deadline=None)
def test_a_prompt_never_leaks(prompt: bytes, output: str) -> None:
    prompt_ids = [3 + byte for byte in prompt]
    detokenizer = Detokenizer(tiny(), prompt_ids)
    text = "".join(detokenizer.push([3 + byte]) for byte in output.encode())
    assert text == output


words = st.text(alphabet="abc", min_size=1, max_size=4)


@given(st.text(alphabet="abc", max_size=40), st.lists(words, min_size=1, max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_stop_scanner_does_not_depend_on_the_cuts(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    scanner = StopScanner(stops)
    shown = ""
    position = 0
    while position < len(text) and scanner.matched is None:
        size = data.draw(st.integers(1, 6))
        shown += scanner.push(text[position : position + size])
        assert not any(stop in shown for stop in stops)
        position += size
    if scanner.matched is None:
        shown += scanner.flush()
    expected, matched = first_stop(text, stops)
    assert shown == expected
    assert scanner.matched == matched


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The oracle: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None
