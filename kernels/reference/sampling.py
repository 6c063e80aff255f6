"""From logits to tokens, all rows of a step at once and without waiting for the device.

The same order of operations, and up to the last bits of ``exp`` and of sums the same tokens, as the
engine's sampler has row by row with numpy: see ``isthmus.engine.sampler``.
"""

from __future__ import annotations

import torch

from isthmus.kernels.types import Penalties, SamplingRows, TokenScores

# Normal float32 numbers: a temperature outside would become 0 or infinite, and 0 ÷ 0 is no weight.
LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
MOST_TEMPERATURE = torch.finfo(torch.float32).max

_MINUS_INFINITY = float("-inf")


def adjust_logits(
    logits: torch.Tensor,
    *,
    bias_ids: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    penalties: Penalties | None = None,
    bitmask: torch.Tensor | None = None,
) -> None:
    if bias_ids is not None and biases is not None:
        add_biases(logits, bias_ids, biases)
    if penalties is not None:
        _penalise(logits, penalties)
    if bitmask is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        is_allowed = (bitmask[:, ids // 32] >> (ids % 32)) & 1
        logits.masked_fill_(is_allowed == 0, _MINUS_INFINITY)


def add_biases(logits: torch.Tensor, bias_ids: torch.Tensor, biases: torch.Tensor) -> None:
    """The first step of ``adjust_logits``. Padding adds 0 to token 0."""
    logits.scatter_add_(1, bias_ids.clamp(min=0), biases.masked_fill(bias_ids < 0, 0.0))


def _penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    counts = penalties.output_counts[penalties.table_rows]  # [K, V]
    was_put_out = counts > 0
    is_known = was_put_out | penalties.is_in_prompt[penalties.table_rows]
    repetition = penalties.repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(is_known, repeated, logits)
    penalised -= was_put_out * penalties.presence.unsqueeze(1)
    penalised -= counts * penalties.frequency.unsqueeze(1)
    logits.copy_(penalised)


def draw_tokens(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    greedy_ids = logits.argmax(dim=1, keepdim=True)  # the first among equals, or a NaN
    peaks = logits.gather(1, greedy_ids)
    is_usable = torch.isfinite(peaks)
    temperature = rows.temperature.clamp(LEAST_TEMPERATURE, MOST_TEMPERATURE).unsqueeze(1)
    weights = torch.exp((logits - peaks) / temperature)  # the largest is 1
    ends = _filtered(weights, rows).cumsum(dim=1, dtype=torch.float64)
    totals = ends[:, -1:]
    # Rounding must not step past the end.
    below = torch.nextafter(totals, torch.zeros_like(totals))
    targets = torch.minimum(rows.uniforms.unsqueeze(1) * totals, below)
    drawn_ids = torch.searchsorted(ends, targets, right=True)
    ids = torch.where(rows.temperature.unsqueeze(1) == 0, greedy_ids, drawn_ids)
    return torch.where(is_usable, ids, 0).squeeze(1), is_usable.squeeze(1)


def _filtered(weights: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The weights [K, V] with 0 for what top_k, top_p and min_p leave out."""
    vocab_size = weights.shape[1]
    top_k, top_p = rows.top_k.unsqueeze(1), rows.top_p.unsqueeze(1)
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    places = torch.arange(vocab_size, device=weights.device)
    is_kept = (top_k <= 0) | (places < top_k)
    mass = (ordered * is_kept).cumsum(dim=1, dtype=torch.float64)
    before = mass.roll(1, dims=1)
    before[:, 0] = 0
    needed = top_p * mass[:, -1:]
    is_kept &= (top_p >= 1) | (places == 0) | (before < needed)
    is_kept &= ordered >= rows.min_p.unsqueeze(1)
    return torch.zeros_like(weights).scatter_(1, order, ordered * is_kept)


def describe_tokens(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenScores:
    values = logits.gather(1, token_ids.unsqueeze(1))
    peaks = logits.amax(dim=1, keepdim=True)
    sums = torch.exp(logits - peaks).sum(dim=1, keepdim=True, dtype=torch.float64)
    log_totals = peaks + sums.log()  # [K, 1] float64
    top_ids = largest(logits, num_top)
    return TokenScores(
        logprobs=(values - log_totals).squeeze(1).float(),
        ranks=(logits > values).sum(dim=1),
        top_ids=top_ids,
        top_logprobs=(logits.gather(1, top_ids) - log_totals).float(),
    )


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids int64 [K, n] of the largest logits, the largest first, the lower id first of equals.

    ``topk`` leaves the order of equals open, so it gets keys that are all different: the bits of
    the logit, made to order as integers do, above the id counted from the end.
    """
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: −0 and 0 are equal
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    from_end = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = ((ordered << 32) | from_end).topk(min(count, vocab_size), dim=1).values
    return vocab_size - 1 - (keys & 0xFFFFFFFF)
