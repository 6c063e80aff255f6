"""Triton's attention kernels against the reference, run by Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from isthmus.kernels import reference
from isthmus.kernels.tolerances import PRODUCT_TOLERANCES, TOLERANCES, Tolerance, assert_close
from isthmus.kernels.triton.attention_call import AttentionCall
from isthmus.kernels.triton.decode_attention import (
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    PROGRAMS_PER_SM,
    DecodePlan,
    decode_attention,
    num_splits,
)
from isthmus.kernels.triton.paged_attention import paged_attention
from isthmus.kernels.triton.prefill_attention import PrefillPlan, prefill_attention
from tests.support.paged_kv import PagedCase, paged_case

pytestmark = pytest.mark.interpreted

Kernel = Literal["decode", "split decode", "prefill"]
KERNELS: tuple[Kernel, ...] = ("decode", "split decode", "prefill")
# Where it matters what is computed, not where it is stored: splits do all that one split does.
UNLIKE_KERNELS: tuple[Kernel, ...] = ("split decode", "prefill")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
BYTES = [torch.int8, torch.float8_e4m3fn]


@dataclass(frozen=True)
class Options:
    """What a case does not say of a call."""

    sliding_window: int | None = None
    soft_cap: float | None = None
    kv_scales: torch.Tensor | None = None


def expected_of(case: PagedCase, options: Options) -> torch.Tensor:
    return reference.paged_attention(
        *case.args(),
        options.sliding_window,
        soft_cap=options.soft_cap,
        kv_scales=options.kv_scales,
    )


def run(kernel: Kernel, case: PagedCase, options: Options) -> torch.Tensor:
    """One kernel over tiles so small that tiny sequences need several."""
    call = AttentionCall(
        q=case.q,
        kv=case.kv,
        layer=case.layer,
        query_start=case.query_start,
        seq_lens=case.seq_lens,
        block_table=case.block_table,
        out=case.q.new_full((case.q.shape[0], case.q.shape[1] * case.q.shape[2]), torch.nan),
        scale=case.scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        kv_scales=options.kv_scales,
        max_query_len=int(case.query_start.diff().max()),
        max_seq_len=int(case.seq_lens.max()),
    )
    if kernel == "prefill":
        prefill_attention(call, PrefillPlan(rows=32, tile_tokens=32, num_warps=4, num_stages=1))
    else:
        splits = 2 if kernel == "split decode" else 1
        decode_attention(call, DecodePlan(splits, 32, 32, num_warps=4, num_stages=1))
    return call.out


def check(kernel: Kernel, case: PagedCase, options: Options = Options()) -> None:
    tolerance = PRODUCT_TOLERANCES.get(case.q.dtype, TOLERANCES["paged_attention"])
    assert_close(
        "paged_attention", run(kernel, case, options), expected_of(case, options), tolerance
    )


def as_floats(case: PagedCase, dtype: torch.dtype) -> PagedCase:
    return replace(case, q=case.q.to(dtype), kv=case.kv.to(dtype))


def quantised(case: PagedCase, dtype: torch.dtype) -> tuple[PagedCase, torch.Tensor]:
    kv, scales = reference.quantise_kv(case.kv, dtype)
    return replace(case, kv=kv), scales


def tiny(query_lens: list[int], seq_lens: list[int], num_heads: int = 3, **shape: int) -> PagedCase:
    """One KV head of 16 numbers unless said otherwise: the interpreter is slow."""
    return paged_case(
        query_lens, seq_lens, num_heads=num_heads, **{"num_kv_heads": 1, "head_dim": 16} | shape
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads"), [(16, 1, 1), (32, 6, 2), (64, 4, 1), (16, 8, 1)]
)
def test_attention_equals_the_reference_for_mixed_batches(
    kernel: Kernel, block_size: int, num_heads: int, num_kv_heads: int
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "block_size": block_size}
    check(kernel, tiny([1, 9], [70, 65], num_heads, **shape))


@pytest.mark.parametrize("kernel", UNLIKE_KERNELS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_takes_the_usual_head_sizes(kernel: Kernel, head_dim: int) -> None:
    check(kernel, tiny([3], [50], head_dim=head_dim))


@pytest.mark.parametrize("kernel", UNLIKE_KERNELS)
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, 30.0), (1, None), (20, 0.5), (40, None), (500, None)]
)
def test_window_and_soft_cap_are_kept(
    kernel: Kernel, window: int | None, soft_cap: float | None
) -> None:
    check(kernel, tiny([12], [100]), Options(window, soft_cap))


@pytest.mark.parametrize("kernel", UNLIKE_KERNELS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_computes_in_the_dtype_of_the_model(kernel: Kernel, dtype: torch.dtype) -> None:
    check(kernel, as_floats(tiny([7], [90], head_dim=32), dtype))


@pytest.mark.parametrize("kernel", UNLIKE_KERNELS)
@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize(("window", "head_dim"), [(None, 16), (20, 24)])
def test_attention_reads_quantised_kv(
    kernel: Kernel, dtype: torch.dtype, window: int | None, head_dim: int
) -> None:
    case, scales = quantised(tiny([7], [70], head_dim=head_dim), dtype)
    check(kernel, case, Options(window, kv_scales=scales))


@settings(max_examples=6, deadline=None)
@given(
    kernel=st.sampled_from(KERNELS),
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 60)), min_size=1, max_size=2),
    num_heads=st.sampled_from([1, 3, 5]),
    head_dim=st.sampled_from([4, 24, 32]),
    block_size=st.sampled_from([4, 16, 24, 64]),
    window=st.one_of(st.none(), st.integers(1, 100)),
    soft_cap=st.one_of(st.none(), st.floats(0.5, 50)),
    bytes_dtype=st.sampled_from([None, *BYTES]),
)
def test_attention_equals_the_reference_for_any_shape(
    kernel: Kernel,
    lengths: list[tuple[int, int]],
    num_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    bytes_dtype: torch.dtype | None,
) -> None:
    query_lens = [query for query, _ in lengths]
    seq_lens = [query + before for query, before in lengths]
    case = tiny(query_lens, seq_lens, num_heads, head_dim=head_dim, block_size=block_size)
    scales = None
    if bytes_dtype is not None:
        case, scales = quantised(case, bytes_dtype)
    check(kernel, case, Options(window, soft_cap, scales))


@pytest.mark.parametrize("kernel", UNLIKE_KERNELS)
def test_blocks_behind_the_window_are_never_read(kernel: Kernel) -> None:
    case = tiny([2], [100])
    expected = expected_of(case, Options(20))
    freed = case.block_table[0, :4]  # positions 0 … 63; the first query sees from 79 on
    case.kv[freed.long()] = torch.nan
    case.block_table[0, :4] = 0
    assert_close("paged_attention", run(kernel, case, Options(20)), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_padding", [1, 70])
def test_rows_of_no_sequence_are_zero(kernel: Kernel, num_padding: int) -> None:
    case = tiny([3, 1], [40, 2])
    padded = replace(case, q=torch.cat((case.q, torch.full((num_padding, 3, 16), 5.0))))
    actual = run(kernel, padded, Options())
    assert torch.equal(actual[4:], torch.zeros(num_padding, 48))
    assert torch.equal(actual[:4], run(kernel, case, Options()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_sequences_without_queries_do_no_harm(kernel: Kernel) -> None:
    """As in a captured step with more places than sequences."""
    case = tiny([0, 2, 0, 0], [5, 40, 0, 0])
    check(kernel, case)


@pytest.mark.parametrize("kernel", UNLIKE_KERNELS)
def test_attention_survives_scores_far_apart(kernel: Kernel) -> None:
    case = tiny([30], [70])
    case.q.mul_(200.0)  # and with them grow the rounding errors that the exponential magnifies
    actual = run(kernel, case, Options())
    bounds = Tolerance(rtol=2e-3, atol=1e-3)
    assert_close("paged_attention", actual, expected_of(case, Options()), bounds)


@pytest.mark.parametrize("kernel", UNLIKE_KERNELS)
def test_rows_and_blocks_may_lie_apart(kernel: Kernel) -> None:
    case = tiny([5, 1], [40, 33], num_heads=6, num_kv_heads=2)
    wide_rows = torch.zeros(6, 10 * 16)
    wide_rows[:, : 6 * 16] = case.q.view(6, -1)
    wide_blocks = torch.full((case.kv.shape[0], 3, *case.kv.shape[1:]), torch.nan)
    wide_blocks[:, 1] = case.kv
    apart = replace(case, q=wide_rows[:, : 6 * 16].view(6, 6, 16), kv=wide_blocks[:, 1])
    assert torch.equal(run(kernel, apart, Options()), run(kernel, case, Options()))


def test_lengths_unknown_to_the_host_are_looked_up() -> None:
    for query_lens in ([1, 1], [1, 100]):
        case = tiny(query_lens, [90, 100])
        hinted = paged_attention(*case.args(), max_query_len=max(query_lens), max_seq_len=100)
        assert torch.equal(paged_attention(*case.args()), hinted)
        assert_close("paged_attention", hinted, expected_of(case, Options()))


def test_hints_may_be_larger_than_the_truth() -> None:
    """As in a captured step, which is replayed for fewer sequences and shorter ones."""
    case = tiny([1, 1, 0], [90, 300, 0])
    padded = replace(case, q=torch.cat((case.q, torch.ones(1, 3, 16))))
    actual = paged_attention(*padded.args(), max_query_len=1, max_seq_len=4096)
    assert_close("paged_attention", actual[:2], expected_of(case, Options()))
    assert torch.equal(actual[2], torch.zeros(48))


@given(
    num_sequences=st.integers(1, 4096),
    num_kv_heads=st.integers(1, 128),
    max_seq_len=st.integers(1, 1_000_000),
    num_sms=st.integers(1, 160),
)
def test_splits_fill_the_device_but_are_never_tiny(
    num_sequences: int, num_kv_heads: int, max_seq_len: int, num_sms: int
) -> None:
    splits = num_splits(num_sequences, num_kv_heads, max_seq_len, num_sms)
    assert splits.bit_count() == 1
    assert splits <= MAX_SPLITS
    if splits > 1:  # a half as many would have been too few, and not too long
        assert num_sequences * num_kv_heads * splits // 2 < PROGRAMS_PER_SM * num_sms
        assert splits // 2 * MIN_SPLIT_TOKENS <= max_seq_len


def test_a_step_without_tokens_is_empty() -> None:
    case = paged_case([], [], head_dim=16)
    assert paged_attention(*case.args()).shape == (0, 9 * 16)
