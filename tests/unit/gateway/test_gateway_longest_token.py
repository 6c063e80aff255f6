"""A bound on how much text a token can stand for, and none where nobody can know."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, normalizers, pre_tokenizers

from isthmus.gateway.longest_token import NO_BOUND, longest_token
from tests.support.tiny_tokenizer import SPECIAL, WORDS, build_tiny_backend

TABLE = [token.encode() for token in (*SPECIAL, *WORDS)]
LONGEST = max(len(token) for token in TABLE)


def spec(**parts: Any) -> dict[str, Any]:
    backend = build_tiny_backend()
    for name, part in parts.items():
        setattr(backend, name, part)
    made: dict[str, Any] = json.loads(backend.to_str())
    return made


@given(text=st.text("the onezta <|imstar>\u0301é안\n", max_size=200))
def test_no_text_has_fewer_tokens_than_the_bound_says(text: str) -> None:
    for normalizer in (None, normalizers.NFC()):
        backend = build_tiny_backend()
        backend.normalizer = normalizer
        bound = longest_token(json.loads(backend.to_str()), TABLE)
        assert bound > 0
        assert len(text) <= bound * len(backend.encode(text).ids)


@pytest.mark.parametrize(
    ("parts", "bound"),
    [
        ({}, LONGEST),
        ({"normalizer": normalizers.NFC()}, 4 * LONGEST),
        ({"normalizer": normalizers.Replace(" ", "▁")}, LONGEST),
        ({"normalizer": normalizers.Replace("  ", " ")}, NO_BOUND),
        ({"normalizer": normalizers.Strip()}, NO_BOUND),
        (
            {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])},
            NO_BOUND,
        ),
        ({"pre_tokenizer": pre_tokenizers.Whitespace()}, NO_BOUND),
        ({"pre_tokenizer": pre_tokenizers.Split(" ", "removed")}, NO_BOUND),
        ({"pre_tokenizer": pre_tokenizers.Split(" ", "isolated")}, LONGEST),
    ],
)
def test_steps_that_drop_text_leave_no_bound(parts: dict[str, Any], bound: int) -> None:
    assert longest_token(spec(**parts), TABLE) == bound


def test_a_token_that_swallows_spaces_leaves_no_bound() -> None:
    backend = build_tiny_backend()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    assert longest_token(json.loads(backend.to_str()), TABLE) == NO_BOUND


@pytest.mark.parametrize(
    ("model", "is_bounded"),
    [
        ({"unk_token": "?", "fuse_unk": True}, False),
        ({"unk_token": "?", "fuse_unk": False}, True),
        ({"unk_token": "?", "fuse_unk": True, "byte_fallback": True}, True),
        ({"type": "Unigram", "byte_fallback": False}, False),
        ({"type": "Unigram", "byte_fallback": True}, True),
        ({"type": "WordPiece"}, False),
    ],
)
def test_runs_of_unknown_text_leave_no_bound(model: dict[str, Any], is_bounded: bool) -> None:
    made = spec()
    made["model"] |= model
    assert (longest_token(made, TABLE) != NO_BOUND) == is_bounded
