"""Speeds of instances from measured data: DistServe's and Splitwise's published profiles.

- DistServe (Zhong et al., OSDI 2024), its simulator's JSON: per model and tensor-parallel size
  prefill = a + b·Σlen + c·Σlen² and decode = a + b·Σcontext + c·batch, milliseconds.
- Splitwise (Patel et al., ISCA 2024), its performance model's CSV: prompts and batches with their
  prompt time and time per token, milliseconds; the closed form is fitted to it here.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from isthmus.common.errors import ConfigError
from isthmus.sim.step_model import DecodeLine, StepModel

GPU_BYTES = 80e9
GPU_USE = 0.9  # of its memory, for weights and KV
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of all weights and of one token's KV, 16 bit."""

    weight_bytes: float
    kv_token_bytes: int


# From the models' published shapes: 2 · layers · KV heads · head dimension · 2 bytes.
MODEL_SIZES = {
    "facebook/opt-13b": ModelSize(26e9, 2 * 40 * 5_120 * 2),
    "facebook/opt-66b": ModelSize(132e9, 2 * 64 * 9_216 * 2),
    "facebook/opt-175b": ModelSize(350e9, 2 * 96 * 12_288 * 2),
    "llama2-70b": ModelSize(138e9, 2 * 80 * 8 * 128 * 2),
    "bloom-176b": ModelSize(352e9, 2 * 70 * 112 * 128 * 2),
}


def kv_tokens(model: str, num_gpus: int) -> int:
    """Tokens whose KV fits beside the weights. Raises ConfigError when the weights do not."""
    size = MODEL_SIZES.get(model)
    if size is None:
        known = ", ".join(MODEL_SIZES)
        message = f"the size of model '{model}' is not known ({known}); say num_blocks"
        raise ConfigError(message, stage="profile")
    left = num_gpus * GPU_BYTES * GPU_USE - size.weight_bytes
    tokens = int(left / size.kv_token_bytes)
    if tokens < 1_024:
        raise ConfigError(f"{model} does not fit on {num_gpus} GPUs of 80 GB", stage="profile")
    return tokens


def read_distserve(file: Path, model: str, tp_size: int, *, with_overheads: bool) -> StepModel:
    """``with_overheads`` adds what DistServe's simulator adds to the profile: 2 ms and 0.1 µs a
    token for its scheduler in every step, and 1 ms to a prefill step.

    Raises ConfigError for what is not in the file.
    """
    table = _read_json(file)
    try:
        entry = table[model][str(tp_size)]
        base, token, square = (float(value) for value in entry["prefill"])
        small = _decode_line(entry["decoding_smallbs"], with_overheads)
        large = _decode_line(entry["decoding_largebs"], with_overheads)
        (threshold,) = np.atleast_1d(entry["decoding_large_small_bs_threshold"])
    except (KeyError, TypeError, ValueError) as error:
        known = ", ".join(f"{name} × {'/'.join(sizes)}" for name, sizes in table.items())
        message = f"{file} has no profile of {model} × {tp_size}; there are: {known}"
        raise ConfigError(message, stage="profile") from error
    if with_overheads:
        base, token = base + 3.0, token + 1e-4
    return StepModel(base, token, 2 * square, small, large, int(threshold))


def read_splitwise(file: Path, model: str, hardware: str, tp_size: int) -> StepModel:
    """Least squares of relative errors, no coefficient below zero, over the rows of one model,
    hardware and size: prefill over single prompts, decode over all batches.

    Raises ConfigError when there are none.
    """
    rows = [
        row
        for row in _read_csv(file)
        if (row.get("model"), row.get("hardware")) == (model, hardware)
        and row.get("tensor_parallel") == str(tp_size)
    ]
    if not rows:
        message = f"{file} has no rows of {model} on {hardware} × {tp_size}"
        raise ConfigError(message, stage="profile")
    prompt = np.array([float(row["prompt_size"]) for row in rows])
    batch = np.array([float(row["batch_size"]) for row in rows])
    output = np.array([float(row["token_size"]) for row in rows])
    prompt_ms = np.array([float(row["prompt_time"]) for row in rows])
    token_ms = np.array([float(row["token_time"]) for row in rows])
    single = batch == 1
    one = prompt[single]
    prefill = fit_nonnegative(
        np.stack([np.ones_like(one), one, one**2 / 2], axis=1), prompt_ms[single]
    )
    context = batch * (prompt + output / 2)
    decode = fit_nonnegative(np.stack([np.ones_like(batch), batch, context], axis=1), token_ms)
    return StepModel(*prefill, DecodeLine(*decode))


def fit_nonnegative(columns: Floats, measured: Floats) -> tuple[float, float, float]:
    """The coefficients ≥ 0 of three columns [n, 3] with the least squared relative error.

    With three coefficients the best subset is found by trying all seven.
    """
    scaled = columns / measured[:, None]
    ones = np.ones(len(measured))
    best, best_error = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)
            error = float(((scaled[:, chosen] @ part - ones) ** 2).sum())
            if part.min() >= 0 and error < best_error - 1e-12:
                best, best_error = np.zeros(3), error
                best[list(chosen)] = part
    first, second, third = (float(value) for value in best)
    return first, second, third


def _decode_line(values: list[float], with_overheads: bool) -> DecodeLine:
    base, context, seq = (float(value) for value in values)
    if with_overheads:  # its context does not count the token that a step adds
        base, context, seq = base + 2.0, context + 1e-4, seq - 1e-4
    return DecodeLine(base, seq, context)


def _read_json(file: Path) -> dict[str, dict[str, dict[str, list[float]]]]:
    try:
        table = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", stage="profile") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}", stage="profile") from error
    if not isinstance(table, dict) or not all(isinstance(item, dict) for item in table.values()):
        raise ConfigError(f"{file} is not a table of models", stage="profile")
    return table


def _read_csv(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", stage="profile") from error
