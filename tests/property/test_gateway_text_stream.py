"""The text of a stream does not depend on how it was cut: detokeniser and stop scanner."""

from __future__ import annotations

from functools import lru_cache

import hypothesis.strategies as st
from hypothesis import given, settings

from isthmus.common.clock import SystemClock
from isthmus.common.types import FinishReason, SamplingParams, TokenLogprob
from isthmus.gateway.detokenizer import Detokenizer
from isthmus.gateway.gguf_tokenizer import byte_alphabet
from isthmus.gateway.plan import ChoiceDelta, GenerationPlan, PreparedPrompt
from isthmus.gateway.sequence_output import SequenceOutput
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


LETTERS = [3 + byte for byte in "abcé".encode()]  # a token each, of which two make the last one


@given(
    st.lists(st.sampled_from([1, 2, *LETTERS]), max_size=30),
    st.sets(st.sampled_from([2, *LETTERS]), max_size=2),
    st.lists(words, max_size=2),
    st.integers(0, 4),
    st.booleans(),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_tokens_that_come_together_say_what_they_would_one_by_one(
    ids: list[int],
    stop_ids: set[int],
    stops: list[str],
    min_tokens: int,
    has_logprobs: bool,
    data: st.DataObject,
) -> None:
    sampling = SamplingParams(min_tokens=min_tokens, stop_token_ids=tuple(sorted(stop_ids)))
    together, alone = (make_output(sampling, stops) for _ in range(2))
    position = 0
    while position < len(ids):
        part = ids[position : position + data.draw(st.integers(1, 5))]
        position += len(part)
        logprobs = [TokenLogprob(i, -0.5, 1) for i in part] if has_logprobs else []
        is_stopped = together.push(part, logprobs)
        assert is_stopped is any(alone.push([i], logprobs[k : k + 1]) for k, i in enumerate(part))
        assert seen(together, together.take()) == seen(alone, alone.take())
        if is_stopped:
            break
    for output in (together, alone):
        output.finish(FinishReason.LENGTH, None)
    assert seen(together, together.take()) == seen(alone, alone.take())


def make_output(sampling: SamplingParams, stops: list[str]) -> SequenceOutput:
    prompt = PreparedPrompt("", (3,), (), 40)
    plan = GenerationPlan(
        request_id="r",
        model="tiny",
        prompts=(prompt,),
        num_choices=1,
        sampling=sampling,
        stop_strings=tuple(stops),
        arrival_ns=0,
        deadline_ns=0,
    )
    return SequenceOutput(plan, prompt, sampling, tiny(), SystemClock())


def seen(output: SequenceOutput, delta: ChoiceDelta) -> tuple[object, ...]:
    return delta, output.num_tokens, output.token_ids, output.natural_end()
