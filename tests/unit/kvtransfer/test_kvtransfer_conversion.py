"""KV that changes its dtype on the way is what the receiver would have written itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.errors import LayoutMismatchError, TransferError
from isthmus.common.kv_layout import KvLayout, head_ranges
from isthmus.kernels import reference
from isthmus.kernels.kv_views import TORCH_DTYPES, block_views
from isthmus.kvtransfer.conversion import conversion_of, staged_copies
from isthmus.kvtransfer.copies import Copies
from isthmus.kvtransfer.plan import Side, shared_heads
from isthmus.kvtransfer.receive_session import ReceiveState
from isthmus.kvtransfer.routes import Route
from isthmus.kvtransfer.send_session import SendState
from isthmus.kvtransfer.staging import Converter, Ring, StagedBlocks
from tests.support.transfer_pair import (
    CHECKED,
    NUM_BLOCKS,
    TransferEnd,
    blocks,
    transfer_pair,
)

BF16 = KvLayout("model", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
INT8 = replace(BF16, dtype="int8")
STAGING = 64 * 1024


# --- the ring ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 1200), st.integers(0, 5)), max_size=60))
def test_pieces_of_a_ring_never_overlap_and_all_of_it_comes_back(
    steps: list[tuple[int, int]],
) -> None:
    """Each step takes a piece, or gives back one of those that are out when there is no room."""
    ring = Ring(4096)
    out: dict[int, int] = {}
    for size, which in steps:
        start = ring.try_take(size, str(size))
        if start is None:
            assert out, "an empty ring has room"
            returned = sorted(out)[which % len(out)]
            del out[returned]
            ring.give_back(returned)
            continue
        assert 0 <= start <= start + size <= 4096
        for other, other_size in out.items():
            assert start + size <= other or other + other_size <= start
        out[start] = size
    for start in out:
        ring.give_back(start)
    assert ring.is_empty
    assert ring.try_take(4096) == 0


def test_a_write_that_does_not_end_leaves_room_for_other_peers() -> None:
    ring = Ring(4096)
    stuck = [ring.try_take(1024, "stopped"), ring.try_take(1024, "stopped")]
    assert None not in stuck
    assert ring.try_take(1024, "stopped") is None  # it has its half
    for _ in range(8):  # more than once around
        pieces = [ring.try_take(1024, "well"), ring.try_take(1024, "well")]
        for piece in pieces:
            assert piece is not None
            ring.give_back(piece)


def test_a_piece_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="5000 bytes are more than"):
        Ring(4096).try_take(5000)


# --- what is converted ---------------------------------------------------------------------------


def ranks_of(layout: KvLayout, tp_size: int) -> Iterator[KvLayout]:
    heads = layout.num_kv_heads
    for rank, own in enumerate(head_ranges(heads, tp_size)):
        yield replace(
            layout, num_kv_heads=len(own), total_kv_heads=heads, tp_rank=rank, tp_size=tp_size
        )


@pytest.mark.parametrize(
    ("source_dtype", "dtype"),
    [
        ("float32", "bfloat16"),
        ("float32", "int8"),
        ("float32", "fp8_e4m3"),
        ("bfloat16", "int8"),
        ("bfloat16", "fp8_e4m3"),
    ],
)
@pytest.mark.parametrize(("source_size", "target_size"), [(4, 4), (4, 16), (16, 4)])
@pytest.mark.parametrize(("tp_size", "by_layers"), [(1, False), (2, False), (1, True), (2, True)])
def test_a_converted_block_is_what_the_receiver_would_have_written(
    source_dtype: str, dtype: str, source_size: int, target_size: int, tp_size: int, by_layers: bool
) -> None:
    num_tokens = 29
    source = replace(BF16, dtype=source_dtype, block_size=source_size)
    memory = torch.zeros(10 * source.block_bytes + STAGING, dtype=torch.uint8)
    vectors, _ = block_views(memory, source, 10)
    vectors.copy_(torch.randn(vectors.shape, generator=torch.Generator().manual_seed(3)))
    converter = Converter(memory, source, 10, reference.quantise_kv)
    source_ids = blocks(*range(9, 9 - -(-num_tokens // source_size), -1))
    target_ids = blocks(*range(1, 1 + -(-num_tokens // target_size)))
    for target in ranks_of(replace(source, dtype=dtype, block_size=target_size), tp_size):
        arrived = torch.zeros(10 * target.block_bytes, dtype=torch.uint8)
        for layers in (range(1), range(1, 2)) if by_layers else (range(2),):
            stage, copies = staged(
                *(converter, Side(source, source_ids), Side(target, target_ids)),
                *(range(num_tokens), layers),
            )
            ops = stage.try_fill(copies)
            assert ops is not None
            for op in ops:
                arrived[op.target_offset : op.target_offset + op.num_bytes] = memory[
                    op.source_offset : op.source_offset + op.num_bytes
                ]
            stage.release()
        assert converter.is_idle
        check_arrived(arrived, target, target_ids, vectors, source_ids, num_tokens)


def staged(
    converter: Converter, source: Side, target: Side, tokens: range, layers: range
) -> tuple[StagedBlocks, Copies]:
    route = Route(source.layout, target.layout, shared_heads(source.layout, target.layout))
    conversion = conversion_of(source, route, tokens, layers, None)
    return converter.stage(conversion), staged_copies(conversion, target, None)


def check_arrived(
    arrived: torch.Tensor,
    target: KvLayout,
    target_ids: list[int],
    vectors: torch.Tensor,
    source_ids: list[int],
    num_tokens: int,
) -> None:
    """Token by token."""
    there, scales = block_views(arrived, target, 10)
    own = slice(target.heads.start, target.heads.stop)
    for token in range(num_tokens):
        block, slot = divmod(token, vectors.shape[4])
        written = vectors[source_ids[block], :, :, own, slot]
        block, slot = divmod(token, target.block_size)
        at = (target_ids[block], slice(None), slice(None), slice(None), slot)
        if scales is None:
            assert torch.equal(there[at], written.to(there.dtype))
            continue
        quantised, own_scales = reference.quantise_kv(written, TORCH_DTYPES[target.dtype])
        assert torch.equal(there[at].view(torch.uint8), quantised.view(torch.uint8))
        assert torch.equal(scales[at], own_scales)


# --- a transfer ----------------------------------------------------------------------------------


def converting(end: TransferEnd) -> torch.Tensor:
    """The vectors of an end's blocks."""
    return block_views(torch.from_numpy(end.memory), end.layout, NUM_BLOCKS)[0]


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("staging", [STAGING, 2560])
@pytest.mark.asyncio
async def test_a_transfer_converts_and_checks_what_it_has_converted(
    size: int, staging: int
) -> None:
    """With little staging memory one write waits for another."""
    target = replace(INT8, block_size=size)
    async with transfer_pair("", CHECKED, BF16, target, staging_bytes=staging) as pair:
        converting(pair.prefill).copy_(torch.randn(converting(pair.prefill).shape))
        num_blocks = 16 // size * 2
        send, receive = pair.open(range(num_blocks), num_tokens=30)
        send.push(0, blocks(*range(20, 28)), is_last=True, num_blocks=num_blocks)
        await pair.drive(40)
        await receive.wait_complete()
        await send.drained()
        expected, scales = reference.quantise_kv(converting(pair.prefill)[20:28], torch.int8)
        there, own = block_views(torch.from_numpy(pair.decode.memory), target, NUM_BLOCKS)
        assert own is not None

        def tokens(x: torch.Tensor) -> torch.Tensor:
            """[T, L, 2, G, …]"""
            return x.movedim(4, 1).flatten(0, 1)[:30]

        assert torch.equal(tokens(there[:num_blocks]), tokens(expected))
        assert torch.equal(tokens(own[:num_blocks]), tokens(scales))
        assert pair.prefill.converter is not None
        assert pair.prefill.converter.is_idle
        pair.assert_idle()


@pytest.mark.asyncio
async def test_a_write_without_room_waits_and_a_cancelled_one_gives_its_room_back() -> None:
    async with transfer_pair("0+:hang", CHECKED, BF16, INT8, staging_bytes=1536) as pair:
        converter = pair.prefill.converter
        assert converter is not None
        send, _ = pair.open(range(8))
        send.push(0, blocks(*range(8)), is_last=True)
        await pair.drive(6)
        assert send.state is SendState.DRAINING_NIC
        sides = Side(BF16, blocks(1)), Side(INT8, blocks(1))
        stage, copies = staged(converter, *sides, range(4), range(2))
        assert stage.try_fill(copies) is not None  # of another peer, which has room
        stage.release()
        ((_, stage.owner), *_) = converter._ring._pieces.values()
        assert stage.try_fill(copies) is None
        send.cancel()
        await pair.prefill.manager.forget(pair.decode.ref.instance_id)
        await pair.drive(6)
        assert converter.is_idle


@pytest.mark.asyncio
async def test_a_conversion_that_fails_ends_the_session_and_nothing_is_sent() -> None:
    async with transfer_pair("", CHECKED, BF16, INT8, staging_bytes=STAGING) as pair:
        converter = pair.prefill.converter
        assert converter is not None

        def broken(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
            raise RuntimeError("no such kernel")

        converter._quantise = broken  # type: ignore[assignment]
        send, receive = pair.open(range(4))
        send.push(0, blocks(*range(4)), is_last=True)
        await pair.drive(4)
        with pytest.raises(TransferError, match="staging raised RuntimeError"):
            await send.drained()
        assert receive.state is ReceiveState.FAILED  # told so by the sender
        assert await send.quiesce()
        assert converter.is_idle


# --- refusals ------------------------------------------------------------------------------------


async def refusal(source: KvLayout, target: KvLayout, staging: int = STAGING) -> str:
    with pytest.raises(LayoutMismatchError) as refused:
        async with transfer_pair("", CHECKED, source, target, staging_bytes=staging):
            raise AssertionError("they shook hands")
    return refused.value.message


@pytest.mark.asyncio
async def test_what_is_quantised_is_not_restored() -> None:
    text = await refusal(INT8, BF16)
    assert "KV in int8 cannot be sent to a store in bfloat16" in text
    assert "int8 cannot be sent to a store in fp8" in await refusal(
        INT8, replace(INT8, dtype="fp8_e4m3")
    )


@pytest.mark.asyncio
async def test_without_staging_memory_or_with_too_little_nothing_is_converted() -> None:
    assert "in 0 bytes of staging memory" in await refusal(BF16, INT8, staging=0)
    text = await refusal(BF16, replace(INT8, block_size=256), staging=1536)
    assert "raise transfer.staging_mib" in text


@pytest.mark.asyncio
async def test_both_sides_refuse_by_themselves() -> None:
    """The initiator does not rely on the answerer."""
    async with transfer_pair("", CHECKED, BF16, BF16) as pair:
        other = TransferEnd("prefill-9", 1, pair.fabric, pair.clock, layout=INT8)
        with pytest.raises(LayoutMismatchError, match="cannot be sent"):
            await pair.decode.manager.complete(other.manager.offer())
        assert not pair.decode.manager.knows(other.ref)
        await asyncio.wait_for(other.manager.close(), 20)
