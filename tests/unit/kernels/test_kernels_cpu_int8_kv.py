"""KV in one byte an element on the CPU: bits of the reference where it writes, and attention that
differs from the reference's by the rounding of queries to 16 bits alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus.common.kv_layout import KvLayout
from isthmus.kernels import Kernels, reference, select
from isthmus.kernels.kv_views import block_views
from isthmus.kernels.tolerances import Tolerance, assert_close
from tests.support.paged_kv import PagedCase, paged_case

# A query's elements are within 2^-16 of its largest; the scores' error is that of the sum.
TOLERANCE = Tolerance(rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def cpu() -> Kernels:
    return select("cpu", 1, "cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantised(case: PagedCase) -> tuple[PagedCase, torch.Tensor]:
    """The case over int8, whose unused slots hold scales that are not numbers."""
    kv, scales = reference.quantise_kv(torch.nan_to_num(case.kv), torch.int8)
    return replace(case, kv=kv), torch.where(case.kv[..., 0].isnan(), torch.nan, scales)


def in_store(kv: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in the memory of a store, where scales lie behind the vectors of each layer."""
    num_blocks, num_layers, _, heads, block_size, head_dim = kv.shape
    layout = KvLayout("m", num_layers, heads, head_dim, block_size, "int8")
    memory = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)
    vectors, own = block_views(memory, layout, num_blocks)
    assert own is not None
    vectors.copy_(kv)
    own.copy_(scales)
    return vectors, own


@pytest.mark.parametrize("head_dim", [64, 128, 32, 80, 20, 576])
@pytest.mark.parametrize("query_lens", [[1, 1], [40, 1], [3, 100]])
@pytest.mark.parametrize("window", [None, 50])
def test_attention_equals_the_reference(
    cpu: Kernels, head_dim: int, query_lens: list[int], window: int | None
) -> None:
    case, scales = quantised(paged_case(query_lens, [150, 130], head_dim=head_dim))
    kv, own = in_store(case.kv, scales)
    actual = cpu.paged_attention(*replace(case, kv=kv).args(), window, kv_scales=own)
    expected = reference.paged_attention(*case.args(), window, kv_scales=scales)
    assert_close("paged_attention", actual, expected, TOLERANCE)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_a_row_does_not_depend_on_its_chunk(
    cpu: Kernels, head_dim: int, window: int | None, chunk: int
) -> None:
    case, scales = quantised(paged_case([200], [230], head_dim=head_dim))
    whole = cpu.paged_attention(*case.args(), window, kv_scales=scales)
    parts = []
    for first in range(0, 200, chunk):
        last = min(first + chunk, 200)
        part = replace(
            case,
            q=case.q[first:last],
            query_start=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=case.seq_lens - (200 - last),
        )
        parts.append(cpu.paged_attention(*part.args(), window, kv_scales=scales))
    assert torch.equal(torch.cat(parts), whole)
    two = select("cpu", 2, "cpu")
    assert torch.equal(two.paged_attention(*case.args(), window, kv_scales=scales), whole)


def test_a_row_does_not_depend_on_the_block_size(cpu: Kernels) -> None:
    """The same tokens in blocks of 16 and of 32."""
    case, scales = quantised(paged_case([2], [64], block_size=16))
    order = case.block_table[0].long()
    wide = paged_case([2], [64], block_size=32)
    kv, own = (torch.zeros_like(quantised(wide)[0].kv), torch.zeros(wide.kv.shape[:-1]))
    for half, block_id in enumerate(order.tolist()):
        to, slots = wide.block_table[0, half // 2], slice(half % 2 * 16, half % 2 * 16 + 16)
        kv[to, :, :, :, slots] = case.kv[block_id]
        own[to, :, :, :, slots] = scales[block_id]
    actual = cpu.paged_attention(*replace(wide, q=case.q, kv=kv).args(), kv_scales=own)
    assert torch.equal(actual, cpu.paged_attention(*case.args(), kv_scales=scales))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_gets_no_number(cpu: Kernels, value: float) -> None:
    case, scales = quantised(paged_case([3], [40]))
    case.q[1, 4, 7] = value
    out = cpu.paged_attention(*case.args(), kv_scales=scales).view(3, 9, 64)
    assert out[1, 4].isnan().all()
    out[1, 4] = 0
    assert out.isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 80, 20])
def test_what_is_written_is_the_references_bits(cpu: Kernels, head_dim: int) -> None:
    q, k, v = randn(20, 9, head_dim), randn(20, 3, head_dim, seed=1), randn(20, 3, head_dim, seed=2)
    k[3], v[4, 1] = 0, 1e-20
    cos_sin = torch.cat((torch.ones(64, head_dim // 2), torch.zeros(64, head_dim // 2)), dim=-1)
    slots = torch.arange(20).flip(0) + 16
    slots[7] = -1
    stores = []
    for kernels in (cpu, reference):
        kv = torch.zeros(4, 2, 2, 3, 16, head_dim, dtype=torch.int8)
        scales = torch.zeros(4, 2, 2, 3, 16)
        kernels.rope_and_cache(  # type: ignore[attr-defined]
            *(q.clone(), k.clone(), v.clone(), cos_sin, torch.arange(20), kv, 1, slots),
            kv_scales=scales,
        )
        stores.append((kv, scales))
    assert all(torch.equal(a, b) for a, b in zip(*stores, strict=True))
    assert stores[0][0].count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 20, 1])
def test_quantising_into_a_store_gives_the_references_bits(
    cpu: Kernels, dtype: torch.dtype, head_dim: int
) -> None:
    x = (randn(30, 2, 3, 16, head_dim) * 8).to(dtype)
    x[2, 1, 0, 3], x[3, 0, 0, 1] = 0, 2.0**-140
    x[4, 0, 1, 2] = torch.linspace(-12.7, 12.7, 2 * head_dim)[:head_dim].to(dtype)
    expected, scales = reference.quantise_kv(x, torch.int8)
    vectors, own = in_store(torch.zeros_like(expected)[None], torch.zeros_like(scales)[None])
    out = vectors[0, :, :, 1:, 2:9], own[0, :, :, 1:, 2:9]
    cpu.quantise_kv(x[:, :, 1:, 5:12], torch.int8, out)
    assert torch.equal(out[0], expected[:, :, 1:, 5:12])
    assert torch.equal(out[1], scales[:, :, 1:, 5:12])
    assert vectors.count_nonzero() == out[0].count_nonzero()
    fresh = cpu.quantise_kv(x, torch.int8)
    assert torch.equal(fresh[0], expected)
    assert torch.equal(fresh[1], scales)


def test_int8_needs_its_scales(cpu: Kernels) -> None:
    case, _ = quantised(paged_case([1], [20]))
    with pytest.raises(AssertionError, match="without scales"):
        cpu.paged_attention(*case.args())
