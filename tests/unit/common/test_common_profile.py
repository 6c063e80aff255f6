"""Saved profiles come back as they were, and what is wrong with one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.common.cluster import LatencyModel, Role
from isthmus.common.errors import ConfigError
from isthmus.common.profile import InstanceProfile, read_profile


def test_profile_survives_a_file(tmp_path: Path) -> None:
    latency = LatencyModel(5, 0.1, 1e-6, 20, 0.5, 1e-4, large_batch=95, large_base=7)
    made = InstanceProfile(name="p0", role=Role.PREFILL, latency=latency, kv_bytes_per_token=23_040)
    file = tmp_path / "p0.json"
    file.write_text(made.to_json(), "utf-8")
    assert read_profile(file) == made


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"latency": {"prefill_tokens": 1}}', "prefill_tokens"),
        ('{"block_sise": 16}', "block_sise"),
        ('{"version": 2}', "version"),
        ("nothing", "not a profile"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=named):
        read_profile(file)


def test_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_profile(tmp_path / "none.json")


def test_second_piece_takes_over_at_its_batch() -> None:
    model = LatencyModel(decode_base=20, decode_seq=1, large_batch=10, large_base=5, large_seq=2)
    assert model.decode_step_ms(9, 0) == 29
    assert model.decode_step_ms(10, 0) == 25
