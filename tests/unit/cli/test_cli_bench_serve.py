"""`isthmus bench serve`: what it refuses before it asks any server, and how it ends."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.common.errors import ConfigError
from isthmus.workload import plots

URL = ("bench", "serve", "--url", "http://127.0.0.1:1", "--model", "m")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--rate", "1", "--rate", "2", "--search"), "--search tries rates of its own"),
        (("--trace", "TRACE", "--prompt", "64"), "--prompt would change nothing"),
        (("--trace", "TRACE", "--cv", "2", "--class", "batch"), "--cv, --class would change"),
        (("--rate", "1", "--scale", "0.5"), "--scale would change nothing: it is for a --trace"),
        (("--rate", "1", "--prefix-tokens", "64"), "--prefix-tokens would change nothing"),
        (("--rate", "1", "--attainment", "0.8"), "--attainment would change nothing"),
    ],
)
def test_flags_that_would_change_nothing(
    flags: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    trace = tmp_path / "calls.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [0]}\n')
    words = [str(trace) if word == "TRACE" else word for word in flags]
    result = CliRunner().invoke(app, [*URL, *words])
    assert isinstance(result.exception, ConfigError)
    assert named in str(result.exception)


@pytest.mark.parametrize("flags", [(), ("--tpot-ms", "50")])
def test_a_search_needs_a_limit_of_waiting(flags: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*URL, "--search", *flags])
    assert isinstance(result.exception, ConfigError)
    assert "needs a TTFT target" in str(result.exception)


def test_a_run_in_which_nothing_was_served_fails() -> None:
    result = CliRunner().invoke(app, [*URL, "--rate", "100", "--requests", "2"])
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "no call was served" in result.output
    assert "TTFT p90 – ms" in result.output


@pytest.mark.parametrize("command", [(*URL, "--rate", "1"), ("sim", "run"), ("sim", "compare")])
def test_a_picture_that_cannot_be_drawn_is_told_before_the_run(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, [*command, "--plot", str(tmp_path / "run.png")])
    assert isinstance(result.exception, ConfigError)
    assert "matplotlib" in str(result.exception)
    assert not result.output


@pytest.mark.parametrize(
    ("key", "said"), [((), "asks for an --api-key"), (("--api-key", "k"), "refused the API key")]
)
def test_a_key_that_is_refused_is_told_apart(
    key: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(url: str, **_: object) -> httpx.Response:
        asked.append(url)
        return httpx.Response(401, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", refuse)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    command = ["bench", "serve", "--url", "http://server/v1/", "--rate", "1", *key]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert asked == ["http://server/v1/models"]
