"""Short ASCII texts to token ids by pieces that are known from texts before.

A byte-level BPE cuts a text at the tokens that were added to its vocabulary, cuts what is between
them by a pattern, and makes tokens of each piece by itself. The same words come again and again, so
mostly their tokens are known, and to look them up takes a quarter of the time. Tokens of a piece
that is not known are those that the backend's own model makes of it.

Only where the rest can be seen to change nothing: an ASCII text, which Unicode's normal forms leave
as it is, and a pattern whose letters, digits and spaces are within ASCII those of Python's ``re``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from tokenizers import Tokenizer

from isthmus.gateway.gguf_tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, byte_alphabet

MAX_TEXT = 4_000  # characters; the backend lets other threads run while it works on longer ones
MAX_PIECE = 32  # characters of one that is worth to be kept
MAX_PIECES = 65_536
_GPT2_SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own
)
_KNOWN_SPLITS = frozenset({_GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT})
_NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_SPELLING = {byte: char for char, byte in byte_alphabet().items() if byte < 0x80}


class PieceMemory:
    """May be used from several threads."""

    def __init__(self, backend: Tokenizer, split: str, added: dict[str, int]) -> None:
        self._model = backend.model
        # Longest first: as the backend does where one begins with another.
        names = sorted(added, key=len, reverse=True)
        self._added: Final = added
        self._between = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._pieces_of = re.compile(_within_ascii(split), re.ASCII).findall
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int] | None:
        """None for a text that is not for this."""
        if len(text) > MAX_TEXT or not text.isascii():
            return None
        parts = self._between.split(text) if self._between is not None else [text]
        ids: list[int] = []
        known = self._known
        for position, part in enumerate(parts):
            if position % 2:
                ids.append(self._added[part])
                continue
            for piece in self._pieces_of(part):
                ids += known.get(piece) or self._learn(piece)
        return ids

    def _learn(self, piece: str) -> list[int]:
        ids = [token.id for token in self._model.tokenize(piece.translate(_SPELLING))]
        if len(piece) <= MAX_PIECE:
            if len(self._known) >= MAX_PIECES:
                self._known.clear()
            self._known[piece] = ids
        return ids


def piece_memory(backend: Tokenizer, spec: dict[str, Any]) -> PieceMemory | None:
    """``spec`` is the tokenizer as its JSON has it. None for one that works in another way."""
    model, added = spec["model"], spec.get("added_tokens") or ()
    is_plain_bpe = model["type"] == "BPE" and not (
        model.get("dropout")
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
    )
    are_plain = not any(
        token[flag] for token in added for flag in ("single_word", "lstrip", "rstrip", "normalized")
    )
    split = _split_of(spec.get("pre_tokenizer"))
    if not (is_plain_bpe and are_plain and _keeps_ascii(spec.get("normalizer"))) or split is None:
        return None
    return PieceMemory(backend, split, {token["content"]: token["id"] for token in added})


def _split_of(step: dict[str, Any] | None) -> str | None:
    """The pattern where it is one of the known ones, and byte level all there is besides."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2_SPLIT
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(split)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return split if split in _KNOWN_SPLITS else None
    return None


def _keeps_ascii(step: dict[str, Any] | None) -> bool:
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(_keeps_ascii(part) for part in step["normalizers"])
    return step["type"] in _NORMAL_FORMS


def _within_ascii(split: str) -> str:
    """A known pattern in ``re``'s words. Outside a class only letters and digits are asked for."""
    inside = re.sub(
        r"\[[^\]]*\]",
        lambda found: found[0].replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9"),
        split,
    )
    return inside.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
