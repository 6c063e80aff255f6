from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isthmus.common.errors import InternalError
from isthmus.common.types import SamplingParams
from isthmus.engine.batch import StepInput, build_step_input
from isthmus.engine.block_table import BlockTable, TableState
from isthmus.engine.philox import philox4x32, uniforms
from isthmus.engine.sampler import SampledToken, describe_token, draw_token, largest, sample
from isthmus.engine.scheduler import StepPlan
from isthmus.engine.sequence import Sequence
from isthmus.engine.types import SequenceMode
from tests.support.engine_driver import make_request

VOCAB_SIZE = 1000


def make_logits(seed: int = 0, size: int = VOCAB_SIZE) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3


def make_sequence(
    prompt: tuple[int, ...] = (1, 2, 3), outputs: tuple[int, ...] = (), **sampling: object
) -> Sequence:
    request = make_request("r", prompt + outputs, num_resumed_tokens=len(outputs), **sampling)
    sequence = Sequence(request, SequenceMode.FULL, [], added_ns=0)
    sequence.table = BlockTable([1] * 8, 0, TableState.USED)  # type: ignore[list-item]
    return sequence


def step_of(*sequences: Sequence) -> StepInput:
    """Every sequence runs all its tokens."""
    counts = tuple(s.num_tokens for s in sequences)
    starts, samples = (0,) * len(counts), (True,) * len(counts)
    plan = StepPlan(0, sequences, starts, counts, samples, sum(counts), 0, 0)
    return build_step_input(plan, block_size=16)


def sample_one(logits: NDArray[np.float32], sequence: Sequence) -> int:
    (sampled,) = sample(torch.from_numpy(logits[None].copy()), step_of(sequence))
    assert isinstance(sampled, SampledToken)
    return sampled.token_id


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer vectors published with Random123
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_values(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    counters = np.array(counter, dtype=np.uint64)[:, None].repeat(3, axis=1)
    keys = np.array(key, dtype=np.uint64)[:, None].repeat(3, axis=1)
    assert philox4x32(counters, keys).T.tolist() == [expected] * 3


def test_draws_depend_on_seed_and_index_alone() -> None:
    together = uniforms([5, 5, -1, 2**64 - 1], [0, 1, 7, 7])
    assert together.tolist() == [
        uniforms([s], [i])[0] for s, i in ((5, 0), (5, 1), (-1, 7), (-1, 7))
    ]
    assert len(set(together.tolist())) == 3
    many = uniforms([3] * 10_000, list(range(10_000)))
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01


def test_the_counter_is_the_index_of_the_output_token() -> None:
    logits = make_logits()
    params = SamplingParams(temperature=1.0)
    for index in range(4):
        expected = draw_token(logits, params, uniforms([7], [index])[0])
        for prompt in ((1,), (1, 2, 3, 4, 5)):
            outputs = tuple(range(index))
            sequence = make_sequence(prompt, outputs, temperature=1.0, seed=7)
            assert sample_one(logits, sequence) == expected


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    logits[[700, 30, 31]] = 4
    assert sample_one(logits, make_sequence()) == 30
    assert sample_one(logits, make_sequence(logprobs=0)) == 30


def test_draw_follows_the_inverse_cdf_in_token_order() -> None:
    logits = make_logits()
    weights = np.exp(logits.astype(np.float64) - logits.max())
    cumulative = np.cumsum(weights) / weights.sum()
    params = SamplingParams(temperature=1.0)
    for draw in np.linspace(0, 0.9999, 57):
        token_id = draw_token(logits, params, float(draw))
        low = cumulative[token_id - 1] if token_id else 0.0
        assert low - 1e-6 <= draw <= cumulative[token_id] + 1e-6


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-53])
def test_extreme_draws_pick_tokens_that_are_possible(draw: float) -> None:
    logits = np.full(VOCAB_SIZE, -np.inf, dtype=np.float32)
    logits[[300, 555]] = [1.0, 2.0]
    assert draw_token(logits, SamplingParams(temperature=0.7), draw) in (300, 555)


def test_sampled_frequencies_match_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    draws = uniforms([1] * 3000, list(range(3000)))
    counts = Counter(draw_token(logits, SamplingParams(temperature=1.0), d) for d in draws)
    assert [round(counts[i] / 3000, 1) for i in range(3)] == [0.5, 0.3, 0.2]


def reference_filter(logits: NDArray[np.float32], params: SamplingParams) -> set[int]:
    """top-k, then top-p, then min-p, by sorting everything."""
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total, mass, nucleus = sum(weights[i] for i in sorted(order)), 0.0, []
    for token_id in order:
        if params.top_p < 1 and nucleus and mass >= params.top_p * total:
            break
        nucleus.append(token_id)
        mass += weights[token_id]
    return {i for i in nucleus if weights[i] >= np.float32(params.min_p)}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_k=10**6),
        SamplingParams(temperature=0.5, top_p=0.01),
        SamplingParams(temperature=3.0, top_p=0.97),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=2.0, top_k=50, top_p=0.8, min_p=0.05),
    ],
)
def test_filters_keep_exactly_the_allowed_tokens(params: SamplingParams) -> None:
    logits = make_logits(1)
    allowed = reference_filter(logits, params)
    drawn = {draw_token(logits, params, float(d)) for d in np.linspace(0, 0.999999, 1000)}
    assert drawn <= allowed
    if len(allowed) < 10:
        assert drawn == allowed


def test_top_k_breaks_ties_by_token_id() -> None:
    assert largest(np.array([1, 3, 2, 3, 2, 2], dtype=np.float32), 3).tolist() == [1, 3, 2]
    assert largest(np.zeros(4, dtype=np.float32), 9).tolist() == [0, 1, 2, 3]
    assert largest(np.zeros(4, dtype=np.float32), 0).tolist() == []


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("count", [1, 2, 15, 64, 700, 5000])
def test_largest_are_those_of_a_full_sort(size: int, count: int) -> None:
    values = make_logits(size, size).round(1)  # with many equals
    values[:: max(1, size // 5)] = -np.inf
    order = sorted(range(size), key=lambda i: (-values[i], i))
    assert largest(values, count).tolist() == order[:count]


def test_tiny_temperature_equals_greedy() -> None:
    logits = make_logits(2)
    assert draw_token(logits, SamplingParams(temperature=1e-6), 0.99) == int(logits.argmax())


def test_rows_do_not_influence_each_other() -> None:
    rows = np.stack([make_logits(i) for i in range(5)])
    sequences = [make_sequence(temperature=1.3, seed=i, top_p=0.9) for i in range(5)]
    sequences[2] = make_sequence()
    together = sample(torch.from_numpy(rows), step_of(*sequences))
    alone = [sample_one(row, sequence) for row, sequence in zip(rows, sequences, strict=True)]
    assert together == [SampledToken(token_id) for token_id in alone]


def test_logit_bias_can_force_and_forbid_a_token() -> None:
    logits = make_logits()
    best = int(logits.argmax())
    assert sample_one(logits, make_sequence(logit_bias=((77, 100.0),))) == 77
    assert sample_one(logits, make_sequence(logit_bias=((best, -100.0),))) != best


def test_penalties_count_outputs_and_repetition_sees_the_prompt() -> None:
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    logits[[5, 6, 7]] = [2.0, 1.9, 1.0]
    assert sample_one(logits, make_sequence(prompt=(5, 5), presence_penalty=0.5)) == 5
    assert sample_one(logits, make_sequence(outputs=(5,), presence_penalty=0.5)) == 6
    assert sample_one(logits, make_sequence(outputs=(5, 5), frequency_penalty=0.05)) == 5
    assert sample_one(logits, make_sequence(outputs=(5, 5, 5), frequency_penalty=0.05)) == 6
    assert sample_one(logits, make_sequence(prompt=(5,), repetition_penalty=1.5)) == 6
    negative = -np.ones(VOCAB_SIZE, dtype=np.float32)
    assert sample_one(negative, make_sequence(prompt=(0, 1), repetition_penalty=2.0)) == 2


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    logits[[4, 9]] = [5.0, 3.0]
    options = {"stop_token_ids": (4, VOCAB_SIZE + 5), "min_tokens": 2, "logit_bias": ((4, 100.0),)}
    assert sample_one(logits, make_sequence(outputs=(8,), **options)) == 9
    assert sample_one(logits, make_sequence(outputs=(8, 8), **options)) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masking_every_token_is_an_error_not_a_token(temperature: float) -> None:
    sequence = make_sequence(stop_token_ids=(0, 1, 2), min_tokens=1, temperature=temperature)
    (sampled,) = sample(torch.from_numpy(make_logits(size=3)[None]), step_of(sequence))
    assert isinstance(sampled, InternalError)


def test_logprobs_are_of_the_penalised_distribution_before_temperature() -> None:
    logits = make_logits(3)
    sequence = make_sequence(
        temperature=0.1, seed=1, logprobs=3, logit_bias=((10, 4.0),), outputs=()
    )
    (sampled,) = sample(torch.from_numpy(logits[None].copy()), step_of(sequence))
    biased = logits.astype(np.float64)
    biased[10] += 4
    expected = biased - np.log(np.exp(biased).sum())
    assert isinstance(sampled, SampledToken)
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == sampled.token_id
    assert math.isclose(sampled.logprob.logprob, expected[sampled.token_id], abs_tol=1e-4)
    assert [i for i, _ in sampled.logprob.top] == np.argsort(-expected)[:3].tolist()
    assert sampled.logprob.rank == int((expected > expected[sampled.token_id]).sum())


def test_description_of_a_token_gives_rank_and_alternatives() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32))
    described = describe_token(logits, 0, 2)
    assert described.rank == 2
    assert math.isclose(described.logprob, math.log(0.1), abs_tol=1e-5)
    assert [i for i, _ in described.top] == [1, 2]
    assert describe_token(logits, 1, 0).top == ()


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}])
def test_row_without_a_usable_number_is_an_error_of_that_row_alone(
    options: dict[str, float],
) -> None:
    rows = np.stack([make_logits(0), make_logits(1)])
    rows[0, 17] = np.nan
    sequences = (make_sequence(**options), make_sequence())
    broken, fine = sample(torch.from_numpy(rows), step_of(*sequences))
    assert isinstance(broken, InternalError)
    assert fine == SampledToken(int(rows[1].argmax()))


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e300])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_any_positive_temperature_gives_a_token(temperature: float, min_tokens: int) -> None:
    """float32 would make it 0 or infinite, and 0 ÷ 0 or ∞ ÷ ∞ is no weight."""
    sequence = make_sequence(
        temperature=temperature, min_tokens=min_tokens, stop_token_ids=(3,), max_tokens=8
    )
    logits = make_logits()
    token_id = sample_one(logits, sequence)
    assert 0 <= token_id < VOCAB_SIZE
    assert not (min_tokens and token_id == 3)
    if temperature < 1e-30:
        assert token_id == int(logits.argmax())


def test_adjustments_that_leave_the_range_of_float32_fail_their_own_row() -> None:
    logits = np.stack([np.full(VOCAB_SIZE, 3e38, dtype=np.float32), make_logits()])
    harmful = make_sequence(temperature=1.0, repetition_penalty=0.01)
    plain = make_sequence(temperature=0.0)
    with np.errstate(over="ignore"):
        first, second = sample(torch.from_numpy(logits), step_of(harmful, plain))
    assert isinstance(first, InternalError)
    assert isinstance(second, SampledToken)
