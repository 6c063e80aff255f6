"""How many characters one token can stand for at most: what cannot fit is then refused unread.

A bound exists only when nothing in the way from text to tokens can drop characters without limit:
no normaliser that deletes, no pre-tokeniser that removes separators, no unknown token that swallows
a run. Where that cannot be seen there is none, and texts are tokenised whatever their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NO_BOUND = 0
# Most characters that canonical composition makes one of (U+1F82 is of four).
_COMPOSED = 4


def longest_token(spec: dict[str, Any], token_bytes: Sequence[bytes]) -> int:
    """Characters; NO_BOUND when there is none. ``spec`` is the tokenizer as its JSON has it."""
    shrinks = _shrinking(spec.get("normalizer"))
    added = spec.get("added_tokens") or ()
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if swallows or not (_keeps_all(spec.get("pre_tokenizer")) and _is_complete(spec["model"])):
        return NO_BOUND
    return shrinks * max(map(len, token_bytes), default=0)


def _shrinking(step: dict[str, Any] | None) -> int:
    """Most characters that become one; NO_BOUND when there is no such number."""
    if step is None:
        return 1
    kind = step["type"]
    if kind == "Sequence":
        factor = 1
        for part in step["normalizers"]:
            factor *= _shrinking(part)
        return factor
    if kind == "Replace":
        searched = step["pattern"].get("String")
        return 1 if searched is not None and len(searched) <= len(step["content"]) else NO_BOUND
    if kind in ("NFC", "NFKC"):
        return _COMPOSED
    return 1 if kind in ("NFD", "NFKD", "Prepend", "ByteLevel") else NO_BOUND


def _keeps_all(step: dict[str, Any] | None) -> bool:
    if step is None:
        return True
    kind = step["type"]
    if kind == "Sequence":
        return all(_keeps_all(part) for part in step["pretokenizers"])
    if kind == "Split":
        return bool(step["behavior"] != "Removed")
    return kind in ("ByteLevel", "Metaspace", "Digits")


def _is_complete(model: dict[str, Any]) -> bool:
    """Whether text that the vocabulary does not have takes at least a token a character."""
    if model.get("byte_fallback"):
        return True
    is_fused = bool(model.get("unk_token")) and bool(model.get("fuse_unk"))
    return model["type"] == "BPE" and not is_fused
