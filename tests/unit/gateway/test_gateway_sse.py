"""One event is one line, whatever a client takes for a line break."""

from __future__ import annotations

import json

import pytest

from isthmus.gateway.sse import frame


@pytest.mark.parametrize(
    "text", ["a\nb\r\nc", "\x0b\x0c\x1c\x1d\x1e", "\x85", "\u2028\u2029", "é🙂"]
)
def test_no_text_breaks_the_line_of_its_event(text: str) -> None:
    data = frame({"text": text}).decode()
    line, empty = data.splitlines()
    assert empty == ""
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


def test_other_characters_stay_as_they_are() -> None:
    assert "é🙂\u2027\u202a" in frame({"text": "é🙂\u2027\u202a"}).decode()
