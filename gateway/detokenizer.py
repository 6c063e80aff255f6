"""Output tokens → text, as they come.

Works on bytes: a character split over tokens is held until it is whole, so no U+FFFD is made of a
split one, and the deltas joined equal the text of all tokens decoded at once (without a character
that the last token left unfinished). Each token costs time in its own length only.

A prompt given as token ids may end inside a character. Its unfinished bytes are the decoder's first
input, so that the output can finish the character; no other part of the prompt is ever seen.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from isthmus.gateway.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"
_MAX_PENDING_BYTES = 3
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One per output sequence."""

    __slots__ = ("_bytes", "_decoder", "_hidden", "_is_inside", "_is_seeded")

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_token_ids
        self._decoder: codecs.IncrementalDecoder | None = None  # most never need one
        seed = unfinished_tail(tokenizer, prompt_ids)
        self._is_seeded = self._is_inside = bool(seed)
        if seed:
            self._decode(seed)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; ids outside the vocabulary and special ones hide."""
        table, hidden = self._bytes, self._hidden
        size = len(table)
        data = b"".join([table[i] for i in token_ids if i not in hidden and i < size])
        if data.isascii() and not self._is_inside:
            return data.decode()  # as most are; the decoder is one of Python's own, and slow
        text = self._decode(data)
        if self._is_seeded and text:
            self._is_seeded = False
            # The output did not finish the prompt's character: that loss is the prompt's.
            text = text.removeprefix(_REPLACEMENT)
        return text

    def _decode(self, data: bytes) -> str:
        if self._decoder is None:
            self._decoder = _Utf8Decoder("replace")
        text = self._decoder.decode(data)
        self._is_inside = bool(self._decoder.getstate()[0])
        return text


def unfinished_tail(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> bytes:
    """The bytes at the end that begin a character and do not finish it; at most three."""
    data = b""
    for token_id in reversed(token_ids):
        if token_id in tokenizer.special_token_ids or len(data) > _MAX_PENDING_BYTES:
            break
        data = tokenizer.token_bytes[token_id] + data
    if data[-1:].isascii():  # nothing there, too
        return b""
    decoder = _Utf8Decoder("replace")
    decoder.decode(data)
    return decoder.getstate()[0]
