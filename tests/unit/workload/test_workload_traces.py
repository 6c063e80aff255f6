"""Recorded workloads: both forms are read, a broken line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.common.errors import ConfigError
from isthmus.workload import at_rate, mean_rate, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
2023-11-16 18:17:05.9799600,110,0
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 4000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_times_count_from_the_first_call(tmp_path: Path) -> None:
    calls = read_trace(write(tmp_path, "code.csv", AZURE))
    assert [round(call.due_s, 6) for call in calls] == [0.0, 0.5, 2.0]
    assert [call.num_prompt_tokens for call in calls] == [4808, 3180, 110]
    assert [call.num_output_tokens for call in calls] == [10, 8, 1]  # an answer has a token


def test_mooncake_blocks_are_kept(tmp_path: Path) -> None:
    calls = read_trace(write(tmp_path, "chat.jsonl", MOONCAKE))
    assert [call.due_s for call in calls] == [0.0, 3.0]
    assert [call.blocks for call in calls] == [(0, 1), (0, 2)]


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, "chat.jsonl", MOONCAKE + "not json")
    assert len(read_trace(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "TIMESTAMP,Other\n2023-11-16 18:17:03.97,1\n", "after 0 calls"),
        ("a.jsonl", MOONCAKE + "{", "after 2 calls"),
        ("a.jsonl", "", "no calls"),
        ("a.txt", "x", "ends in .csv or .jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(write(tmp_path, name, text))


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_another_rate_stretches_the_gaps_alike(tmp_path: Path) -> None:
    calls = read_trace(write(tmp_path, "code.csv", AZURE))
    assert mean_rate(calls) == pytest.approx(1.0)
    faster = at_rate(calls, 4.0)
    assert [call.due_s for call in faster] == pytest.approx([0.0, 0.125, 0.5])
    with pytest.raises(ValueError, match="positive"):
        at_rate(calls, 0.0)
