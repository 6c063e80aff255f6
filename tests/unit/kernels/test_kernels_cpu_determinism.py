"""A row is the same bits whatever batch, chunk, block size and number of threads it meets."""

from __future__ import annotations

import itertools

import pytest
import torch

from isthmus.kernels import Kernels, select
from isthmus.kernels.types import Quantization
from tests.support.paged_kv import PagedCase, paged_case

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def cpu() -> Kernels:
    return select("cpu", 1, "cpu")


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "int8")],
)
@pytest.mark.parametrize(("depth", "width"), [(576, 100), (1500, 48), (2101, 20)])
def test_a_row_of_linear_does_not_depend_on_its_batch(
    cpu: Kernels, dtype: torch.dtype, quantization: Quantization, depth: int, width: int
) -> None:
    x = torch.randn(230, depth)
    weight, bias = torch.randn(width, depth).to(dtype), torch.randn(width)
    packed = cpu.pack_linear(weight, bias, quantization)
    whole = cpu.linear(x, packed)
    for size in (1, 2, 3, 5, 6, 7, 16, 24, 25, 100, 229):
        assert torch.equal(cpu.linear(x[:size], packed), whole[:size]), size
        assert torch.equal(cpu.linear(x[-size:], packed), whole[-size:]), size
    assert torch.equal(select("cpu", 2, "cpu").linear(x, packed), whole)


def chunk_of(case: PagedCase, first: int, last: int) -> PagedCase:
    """Rows first … last − 1 of the only sequence of ``case``, as a step of their own."""
    behind = case.q.shape[0] - last
    return PagedCase(
        case.q[first:last],
        case.kv,
        case.layer,
        torch.tensor([0, last - first], dtype=torch.int32),
        case.seq_lens - behind,
        case.block_table,
        case.scale,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_a_row_of_attention_does_not_depend_on_its_chunk(
    cpu: Kernels, dtype: torch.dtype, window: int | None, chunk: int
) -> None:
    case = paged_case([200], [230], dtype=dtype)
    whole = cpu.paged_attention(*case.args(), window)
    parts = [
        cpu.paged_attention(*chunk_of(case, first, min(first + chunk, 200)).args(), window)
        for first in range(0, 200, chunk)
    ]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("heads", [(16, 1), (8, 1), (10, 2), (2, 2)])
@pytest.mark.parametrize("head_dim", [64, 80, 6])
@pytest.mark.parametrize("window", [None, 3, 70])
def test_a_row_of_attention_does_not_depend_on_the_rows_beside_it(
    cpu: Kernels, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    """Heads that fill a register's lanes, and such that do not, in chunks of one and of many."""
    case = paged_case(
        [75], [140], num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=DTYPES[1]
    )
    whole = cpu.paged_attention(*case.args(), window)
    ends = [0, 1, 2, 9, 42, 43, 75]
    parts = [
        cpu.paged_attention(*chunk_of(case, first, last).args(), window)
        for first, last in itertools.pairwise(ends)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_a_row_of_attention_does_not_depend_on_its_batch_or_threads(cpu: Kernels) -> None:
    case = paged_case([1, 40, 1], [150, 90, 300])
    whole = cpu.paged_attention(*case.args())
    alone = cpu.paged_attention(
        case.q[-1:],
        case.kv,
        case.layer,
        torch.tensor([0, 1], dtype=torch.int32),
        case.seq_lens[-1:],
        case.block_table[-1:],
        case.scale,
    )
    assert torch.equal(alone, whole[-1:])
    assert torch.equal(select("cpu", 2, "cpu").paged_attention(*case.args()), whole)


def test_a_row_of_attention_does_not_depend_on_the_block_size(cpu: Kernels) -> None:
    small = paged_case([30], [200], block_size=16)
    slots = torch.arange(200)
    kv = torch.zeros(4, 2, 2, 3, 64, 64)
    kv[slots // 64, 1, :, :, slots % 64] = small.kv[
        small.block_table[0].long()[slots // 16], 1, :, :, slots % 16
    ]
    table = torch.arange(4, dtype=torch.int32)[None]
    large = cpu.paged_attention(
        small.q, kv, 1, small.query_start, small.seq_lens, table, small.scale
    )
    assert torch.equal(large, cpu.paged_attention(*small.args()))
