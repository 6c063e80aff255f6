"""From logits to tokens. Deterministic: a token depends on its sequence and its logits row alone.

Order of operations on one row::

    logits → logit_bias → repetition, presence, frequency penalties → stop tokens masked
           → [log-probabilities are of this distribution]
           → ÷ temperature → top_k → top_p → min_p → one uniform draw, inverse CDF in token order

Greedy takes the largest value, the lowest token id among equals. A sequence that is greedy and
plain costs one row of a batched argmax; only others are looked at one by one. ``device_sampler``
follows the same rules where logits are on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.common.errors import InternalError
from isthmus.common.types import SamplingParams, TokenLogprob
from isthmus.engine.batch import StepInput
from isthmus.engine.philox import uniforms
from isthmus.engine.sequence import Sequence
from isthmus.engine.stop_rules import must_not_stop_yet

Logits = NDArray[np.float32]  # [V]
_NUCLEUS_HEADS = (256, 4096)  # how many of the likeliest tokens to sort before sorting all
_CDF_BLOCK = 256
# Normal float32 numbers: a temperature outside would become 0 or infinite, and 0 ÷ 0 is no weight.
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
_MOST_TEMPERATURE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: TokenLogprob | None = None  # when asked for


Sampled = SampledToken | InternalError  # an error where the row holds no usable number


def sample(logits: torch.Tensor, step: StepInput) -> list[Sampled]:
    """One token for each of ``step.sampled``; ``logits`` float32 [K, V] on the host."""
    if not step.sampled:
        return []
    best_ids, is_usable = _argmax(logits)
    draws = _draws(step)
    is_plain = all(sequence.is_plain for sequence in step.sampled)
    host_logits = None if is_plain else logits.numpy()
    sampled: list[Sampled] = []
    for sequence, row, position in zip(
        step.sampled, step.sample_rows, step.sample_positions, strict=True
    ):
        if not is_usable[row]:
            sampled.append(unusable(sequence))
        elif sequence.is_plain or host_logits is None:
            sampled.append(SampledToken(best_ids[row]))
        else:
            draw = draws.get(sequence, 0.0)
            sampled.append(_sample_row(host_logits[row], sequence, position, draw))
    return sampled


def append_prompt_logprobs(logits: torch.Tensor, step: StepInput) -> None:
    """Appends what this step's logits say of prompts to their sequences' ``prompt_logprobs``.

    These are of the model's own distribution: no bias, no penalty."""
    for rows in step.prompt_rows:
        count = rows.sequence.request.sampling.prompt_logprobs or 0
        token_ids = rows.sequence.token_ids[rows.first_token : rows.first_token + rows.count]
        row_logits = logits[rows.first_row : rows.first_row + rows.count].numpy()
        rows.sequence.prompt_logprobs.extend(
            describe_token(row, token_id, count)
            for row, token_id in zip(row_logits, token_ids.tolist(), strict=True)
        )


def _argmax(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Of each row: the lowest id of the largest value, and whether that value is a finite number.
    A row with a NaN anywhere is not usable: argmax finds the NaN."""
    values = logits.numpy()
    best = values.argmax(axis=1)  # numpy's is vectorised, torch's is not
    return best.tolist(), np.isfinite(values[np.arange(len(best)), best]).tolist()


def describe_token(logits: Logits, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability and rank of ``token_id``, and the ``num_top`` likeliest tokens."""
    value = logits[token_id]
    peak = logits.max()
    log_total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top = tuple(
        (int(top_id), float(logits[top_id]) - log_total) for top_id in largest(logits, num_top)
    )
    rank = int(np.count_nonzero(logits > value))
    return TokenLogprob(token_id, float(value) - log_total, rank, top)


def largest(values: Logits, count: int) -> NDArray[np.int64]:
    """Ids of the ``count`` largest values, largest first, the lower id first among equals."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= threshold)
    else:
        candidates = np.arange(len(values))
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def _draws(step: StepInput) -> dict[Sequence, float]:
    """The uniform draw of each sequence that needs one, all made at once."""
    random = [
        (sequence, position - sequence.request.num_prompt_tokens)
        for sequence, position in zip(step.sampled, step.sample_positions, strict=True)
        if not sequence.request.sampling.is_greedy
    ]
    if not random:
        return {}
    sequences, output_indices = zip(*random, strict=True)
    values = uniforms([s.request.sampling.seed for s in sequences], output_indices)
    return dict(zip(sequences, values.tolist(), strict=True))


def _sample_row(logits: Logits, sequence: Sequence, position: int, draw: float) -> Sampled:
    sampling = sequence.request.sampling
    logits = _adjusted(logits, sequence, position)
    if not np.isfinite(logits.max()):  # all masked, or an adjustment left the range of float32
        return unusable(sequence)
    greedy = sampling.is_greedy
    token_id = int(logits.argmax()) if greedy else draw_token(logits, sampling, draw)
    if sampling.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, describe_token(logits, token_id, sampling.logprobs))


def _adjusted(logits: Logits, sequence: Sequence, position: int) -> Logits:
    """Logits after bias, penalties and the mask of stop tokens. A copy when anything changes.

    Presence and frequency penalties count output tokens, as OpenAI's do; the repetition penalty
    (Keskar et al., "CTRL", 2019, §4.1) looks at prompt and outputs."""
    sampling = sequence.request.sampling
    output_index = position - sequence.request.num_prompt_tokens
    masks_stops = bool(sampling.stop_token_ids) and must_not_stop_yet(sampling, output_index)
    has_counts = bool(sampling.presence_penalty or sampling.frequency_penalty)
    has_repetition = sampling.repetition_penalty != 1
    if not (sampling.logit_bias or masks_stops or has_counts or has_repetition):
        return logits
    logits = logits.copy()
    if sampling.logit_bias:
        token_ids, biases = zip(*sampling.logit_bias, strict=True)
        np.add.at(logits, np.array(token_ids), np.array(biases, dtype=np.float32))
    if has_repetition:
        seen = np.unique(sequence.token_ids)
        values = logits[seen]
        penalty = np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if has_counts:
        seen, counts = np.unique(sequence.output_token_ids, return_counts=True)
        logits[seen] -= np.float32(sampling.presence_penalty)
        logits[seen] -= counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
    if masks_stops:
        logits[[i for i in sampling.stop_token_ids if i < len(logits)]] = -np.inf
    return logits


def usable_temperature(sampling: SamplingParams) -> float:
    """0 when greedy, else the nearest temperature that float32 can divide by."""
    if sampling.is_greedy:
        return 0.0
    return min(max(sampling.temperature, _LEAST_TEMPERATURE), _MOST_TEMPERATURE)


def draw_token(logits: Logits, sampling: SamplingParams, draw: float) -> int:
    """The token at ``draw`` ∈ [0, 1) of the filtered distribution."""
    temperature = np.float32(usable_temperature(sampling))
    with np.errstate(over="ignore"):  # a tiny temperature makes −inf, which is weight 0
        scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled)  # unnormalised, the largest is 1
    kept = _filtered(weights, sampling)
    if kept is None:
        return _pick(weights, draw)
    return int(kept[_pick(weights[kept], draw)])


def _pick(weights: Logits, draw: float) -> int:
    """The index at which the cumulative weight passes ``draw`` of the total.

    Sums by block first: the running sum over a whole vocabulary costs more than all the rest."""
    starts = np.arange(0, len(weights), _CDF_BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    # Rounding must not step past the end, neither of all blocks nor of one.
    target = min(draw * ends[-1], np.nextafter(ends[-1], 0.0))
    block = int(np.searchsorted(ends, target, side="right"))
    start = block * _CDF_BLOCK
    inner = weights[start : start + _CDF_BLOCK]
    before = ends[block - 1] if block else 0.0
    offset = int(np.searchsorted(np.cumsum(inner, dtype=np.float64), target - before, side="right"))
    return start + min(offset, int(np.flatnonzero(inner)[-1]))


def _filtered(weights: Logits, sampling: SamplingParams) -> NDArray[np.int64] | None:
    """Ids of the tokens that pass top_k, top_p and min_p, ascending; None = all."""
    kept: NDArray[np.int64] | None = None
    if 0 < sampling.top_k < len(weights):
        kept = np.sort(largest(weights, sampling.top_k))
    if sampling.top_p < 1:
        kept = _nucleus(weights, kept, sampling.top_p)
    if sampling.min_p > 0:
        ids = np.arange(len(weights)) if kept is None else kept
        kept = ids[weights[ids] >= np.float32(sampling.min_p)]
    return kept


def _nucleus(weights: Logits, kept: NDArray[np.int64] | None, top_p: float) -> NDArray[np.int64]:
    """The fewest likeliest tokens whose share of the kept mass reaches ``top_p`` (Holtzman et al.,
    "The Curious Case of Neural Text Degeneration", ICLR 2020), ascending; at least one."""
    values = weights if kept is None else weights[kept]
    needed = top_p * values.sum(dtype=np.float64)
    for count in (*_NUCLEUS_HEADS, len(values)):
        order = largest(values, count)
        mass = np.cumsum(values[order], dtype=np.float64)
        if mass[-1] >= needed or len(order) == len(values):
            break
    nucleus = order[: int(np.searchsorted(mass, needed, side="left")) + 1]
    return np.sort(nucleus if kept is None else kept[nucleus])


def unusable(sequence: Sequence) -> InternalError:
    """What a sequence gets whose logits hold no number to go by."""
    return InternalError(
        f"request {sequence.request_id}: no token has a finite logit", stage="sample"
    )
