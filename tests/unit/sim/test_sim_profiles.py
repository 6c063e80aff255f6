from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.common.errors import ConfigError
from isthmus.sim.profiles import fit_nonnegative, kv_tokens, read_distserve, read_splitwise

DISTSERVE = {
    "facebook/opt-13b": {
        "1": {
            "decoding_large_small_bs_threshold": 95,
            "prefill": [18.0, 0.1, 7e-6],
            "decoding_smallbs": [20.0, 6e-4, 0.04],
            "decoding_largebs": [7.0, 5e-4, 0.16],
        }
    }
}


def write_splitwise(path: Path) -> Path:
    """Rows that obey the closed form exactly."""
    with path.open("w", newline="", encoding="utf-8") as lines:
        names = ["model", "hardware", "prompt_size", "batch_size", "token_size", "prompt_time",
                 "token_time", "tensor_parallel"]  # fmt: skip
        writer = csv.DictWriter(lines, names)
        writer.writeheader()
        for prompt, batch in [(128, 1), (512, 1), (2_048, 1), (8_192, 1), (512, 8), (512, 64)]:
            writer.writerow(
                {
                    "model": "llama2-70b",
                    "hardware": "a100-80gb",
                    "prompt_size": prompt,
                    "batch_size": batch,
                    "token_size": 128,
                    "prompt_time": 40 + 0.1 * prompt + 1e-5 * prompt**2 / 2,
                    "token_time": 44 + 0.3 * batch + 1e-4 * batch * (prompt + 64),
                    "tensor_parallel": 8,
                }
            )
    return path


def test_distserves_profile_says_its_own_times(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(DISTSERVE), encoding="utf-8")
    model = read_distserve(file, "facebook/opt-13b", 1, with_overheads=False)
    assert model.prefill_ms(1_000) == pytest.approx(18 + 100 + 7)
    assert model.decode_ms(10, 5_000) == pytest.approx(20 + 3 + 0.4)
    assert model.decode_ms(95, 50_000) == pytest.approx(7 + 25 + 15.2)
    loaded = read_distserve(file, "facebook/opt-13b", 1, with_overheads=True)
    assert loaded.prefill_ms(1_000) == pytest.approx(125 + 3 + 0.1)
    # 2 ms and 0.1 µs for each of the 4 990 tokens that were there before the step.
    assert loaded.decode_ms(10, 5_000) == pytest.approx(23.4 + 2 + 0.499)


def test_what_a_profile_does_not_have_is_named(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(DISTSERVE), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"opt-13b × 4; there are: facebook/opt-13b × 1"):
        read_distserve(file, "facebook/opt-13b", 4, with_overheads=False)
    file.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a table"):
        read_distserve(file, "facebook/opt-13b", 1, with_overheads=False)
    with pytest.raises(ConfigError, match="cannot read"):
        read_distserve(tmp_path / "none.json", "facebook/opt-13b", 1, with_overheads=False)


def test_the_closed_form_is_fitted_to_splitwises_rows(tmp_path: Path) -> None:
    model = read_splitwise(write_splitwise(tmp_path / "perf.csv"), "llama2-70b", "a100-80gb", 8)
    assert model.prefill_ms(4_096) == pytest.approx(40 + 409.6 + 83.9, rel=1e-3)
    assert model.decode_ms(32, 32 * 1_000) == pytest.approx(44 + 9.6 + 3.2, rel=1e-3)
    with pytest.raises(ConfigError, match="no rows"):
        read_splitwise(tmp_path / "perf.csv", "llama2-70b", "h100-80gb", 8)


def test_a_fit_has_no_negative_coefficients() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    columns = np.stack([np.ones_like(x), x, x**2], axis=1)
    first, second, third = fit_nonnegative(columns, 10 - x)
    assert min(first, second, third) >= 0


def test_kv_room_is_what_the_weights_leave() -> None:
    assert 50_000 < kv_tokens("facebook/opt-13b", 1) < 70_000
    assert kv_tokens("llama2-70b", 8) > 1_000_000
    with pytest.raises(ConfigError, match="does not fit"):
        kv_tokens("llama2-70b", 1)
    with pytest.raises(ConfigError, match="not known"):
        kv_tokens("gpt-2", 1)
