"""`isthmus bench serve` refuses flags that would change nothing, before it asks any server."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.common.errors import ConfigError

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
