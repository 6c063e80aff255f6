"""One server-sent event as bytes: whatever is in it, it is one line.

Most events of a stream differ in one text alone. For those a ``TextFrame`` is made once, and only
the text is written anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

# Line breaks to Unicode but not to SSE. Clients that split by the former would cut an event in two.
_FOREIGN_BREAKS = {mark.encode(): b"\\u%04x" % ord(mark) for mark in "\x85\u2028\u2029"}


def frame(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + _one_line(payload) + b"\n\n"


class TextFrame:
    """``payload`` has one field ``name``, which is the empty string: there the text goes."""

    __slots__ = ("_after", "_before")

    def __init__(self, payload: Mapping[str, Any], name: str) -> None:
        # Within a string a quote is escaped, so no value can look like the field.
        place = b'"%s":""' % name.encode()
        before, found, after = frame(payload).partition(place)
        assert found, f"the event has an empty {name}"
        self._before, self._after = before + place[:-2], after

    def fill(self, text: str) -> bytes:
        return self._before + _one_line(text) + self._after


def _one_line(value: Mapping[str, Any] | str) -> bytes:
    data = orjson.dumps(value)
    if not data.isascii():
        for mark, escaped in _FOREIGN_BREAKS.items():
            data = data.replace(mark, escaped)
    return data
