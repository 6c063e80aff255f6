"""One event is one line, whatever a client takes for a line break."""

from __future__ import annotations

import json

import pytest

from isthmus.gateway.event_frame import TextFrame, frame


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


@pytest.mark.parametrize(
    "text", ["", " the", '"content":""', "a\nb\\", "\u2028 \x85", "é🙂", '{"id": 1}']
)
@pytest.mark.parametrize("model", ["tiny", '"content":""', 'a "quoted" name'])
def test_a_filled_frame_is_the_frame_of_the_whole_event(text: str, model: str) -> None:
    def event(content: str) -> dict[str, object]:
        return {"model": model, "choices": [{"delta": {"content": content}, "logprobs": None}]}

    assert TextFrame(event(""), "content").fill(text) == frame(event(text))
