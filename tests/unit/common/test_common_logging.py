"""Lines of a log that is no terminal."""

from __future__ import annotations

import io
import json
import threading

import pytest
import structlog

from isthmus.common.config import LoggingConfig
from isthmus.common.logging import configure_logging, get_logger, render_plain

EVENTS: list[dict[str, object]] = [
    {"event": "request ended", "level": "info", "timestamp": "2026-01-01T00:00:00Z"},
    {"event": "x" * 40, "level": "warning", "timestamp": "t", "b": 1.5, "a": "plain", "empty": ""},
    {
        "event": "e",
        "level": "error",
        "timestamp": "t",
        "text": "two words",
        "quote": "a'b",
        "n": None,
    },
    {"event": "e", "level": "error", "timestamp": "t", "exception": "Traceback\n  line"},
]


@pytest.mark.parametrize("event", EVENTS)
def test_a_plain_line_is_the_console_renderers(event: dict[str, object]) -> None:
    console = structlog.dev.ConsoleRenderer(colors=False)
    assert render_plain(None, "info", dict(event)) == console(None, "info", dict(event))


def test_control_characters_do_not_reach_a_terminal() -> None:
    event: dict[str, object] = {"event": "e", "level": "info", "timestamp": "t", "id": "\x1b[31m"}
    assert render_plain(None, "info", event).endswith(r"id='\x1b[31m'")


def test_a_log_that_is_no_terminal_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    try:
        configure_logging(LoggingConfig(), role="gateway")
        get_logger("request").info("request ended", outcome="ok")
    finally:
        structlog.reset_defaults()
    _, line = written.getvalue().split("[info     ] ")
    assert line == f"{'request ended':<30} component=request outcome=ok role=gateway\n"


def test_lines_of_every_thread_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    try:
        configure_logging(LoggingConfig(format="json"), role="decode", instance="decode-0")
        log = get_logger("engine")
        thread = threading.Thread(target=lambda: log.warning("slow", role="its own"))
        thread.start()
        thread.join(5)
        try:
            raise RuntimeError("broken")
        except RuntimeError:
            log.exception("failed")
    finally:
        structlog.reset_defaults()
    slow, failed = map(json.loads, written.getvalue().splitlines())
    assert (slow["level"], slow["instance"], slow["role"]) == ("warning", "decode-0", "its own")
    assert (failed["level"], failed["role"]) == ("error", "decode")
    assert "RuntimeError: broken" in failed["exception"]
    assert failed["timestamp"].endswith("Z")
