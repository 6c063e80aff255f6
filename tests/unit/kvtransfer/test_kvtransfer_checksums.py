"""What arrived is what was sent, or the transfer fails and says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from isthmus.common.config import TransferConfig
from isthmus.common.errors import ChecksumError, ConfigError, TransferError
from isthmus.common.kv_layout import KvLayout, head_ranges
from isthmus.common.transfer import Checksum
from isthmus.kvtransfer.checksums import block_checksums, host_reader, offered_checksum
from isthmus.kvtransfer.interface import MemoryRegion, PeerName
from isthmus.kvtransfer.notification import Notification
from isthmus.kvtransfer.plan import Side, plan_copies, shared_heads
from isthmus.kvtransfer.receive_session import Proof, ReceiveState
from isthmus.kvtransfer.send_session import SendState
from tests.support.transfer_pair import CHECKED, CONFIG, LAYOUT, blocks, transfer_pair

LARGE = replace(LAYOUT, block_size=16)


def memory_of(layout: KvLayout, num_blocks: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, num_blocks * layout.block_bytes, dtype=np.uint8)


def region_of(memory: np.ndarray) -> MemoryRegion:
    return MemoryRegion(memory.ctypes.data, memory.nbytes)


# --- what a checksum covers ----------------------------------------------------------------------


@pytest.mark.parametrize(("source_size", "target_size"), [(4, 4), (4, 16), (16, 4), (8, 16)])
@pytest.mark.parametrize(("source_ranks", "target_ranks"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_both_sides_compute_the_same_however_blocks_and_heads_are_cut(
    source_size: int, target_size: int, source_ranks: int, target_ranks: int
) -> None:
    def layouts(size: int, ranks: int) -> list[KvLayout]:
        like = replace(LAYOUT, block_size=size, total_kv_heads=2, tp_size=ranks)
        return [
            replace(like, num_kv_heads=len(heads), tp_rank=rank)
            for rank, heads in enumerate(head_ranges(2, ranks))
        ]

    tokens = range(16, 41)
    receiver = layouts(target_size, target_ranks)[-1]
    sender = next(s for s in layouts(source_size, source_ranks) if shared_heads(s, receiver))
    source = Side(sender, blocks(*range(12, 0, -1)))
    target = Side(receiver, blocks(*range(1, 8)), first_token=16)
    here, there = memory_of(source.layout, 13, 1), memory_of(target.layout, 9, 2)
    heads = shared_heads(source.layout, target.layout)
    layers = range(1, LAYOUT.num_layers)

    def sums(side: Side, memory: np.ndarray) -> tuple[int, ...]:
        num_blocks = memory.nbytes // side.layout.block_bytes
        read = host_reader(region_of(memory), side.layout, num_blocks)
        return block_checksums(read, side, tokens, target_size, heads, layers)

    before = sums(target, there)
    for op in plan_copies(source, target, tokens, layers=layers):
        moved = here[op.source_offset : op.source_offset + op.num_bytes]
        there[op.target_offset : op.target_offset + op.num_bytes] = moved
    assert sums(target, there) == sums(source, here) != before
    assert len(before) == -(-25 // target_size)


def test_slots_behind_the_last_token_are_not_covered() -> None:
    memory = memory_of(LAYOUT, 2, 1)
    read = host_reader(region_of(memory), LAYOUT, 2)
    side, layers = Side(LAYOUT, blocks(1)), range(LAYOUT.num_layers)
    before = block_checksums(read, side, range(3), 4, LAYOUT.heads, layers)
    (block,) = read(blocks(1)[0])
    block[:, :, :, 3] ^= 255
    assert block_checksums(read, side, range(3), 4, LAYOUT.heads, layers) == before
    block[0, 0, 0, 2, 0] ^= 1
    assert block_checksums(read, side, range(3), 4, LAYOUT.heads, layers) != before


def test_scales_are_covered() -> None:
    layout = replace(LAYOUT, dtype="int8")
    memory = memory_of(layout, 2, 1)
    read = host_reader(region_of(memory), layout, 2)
    side = Side(layout, blocks(1))
    before = block_checksums(read, side, range(3), 4, layout.heads, range(2))
    _, scales = read(blocks(1)[0])
    scales[:, :, :, 3] ^= 255
    assert block_checksums(read, side, range(3), 4, layout.heads, range(2)) == before
    scales[1, 1, 0, 2, 3] ^= 1
    assert block_checksums(read, side, range(3), 4, layout.heads, range(2)) != before


def test_a_layer_whose_window_a_block_has_left_is_not_covered() -> None:
    memory = memory_of(LAYOUT, 3, 1)
    read = host_reader(region_of(memory), LAYOUT, 3)
    side, needed = Side(LAYOUT, blocks(1, 2)), np.array([0, 5])

    def sums() -> tuple[int, ...]:
        return block_checksums(read, side, range(8), 4, LAYOUT.heads, range(2), needed)

    before = sums()
    (first,), (second,) = read(blocks(1)[0]), read(blocks(2)[0])
    first[1] ^= 255
    assert sums() == before
    first[0] ^= 255
    second[1] ^= 255
    assert all(a != b for a, b in zip(sums(), before, strict=True))


@pytest.mark.parametrize(
    ("checksum", "device", "offered"),
    [
        ("auto", "cpu", Checksum.XXH3),
        ("auto", "cuda:0", Checksum.NONE),
        ("xxh3", "cpu", Checksum.XXH3),
        ("none", "cpu", Checksum.NONE),
    ],
)
def test_checksums_are_for_host_memory(checksum: str, device: str, offered: Checksum) -> None:
    config = TransferConfig.model_validate({"checksum": checksum})
    assert offered_checksum(config, MemoryRegion(0, 8, device)) is offered


def test_checksums_that_cannot_be_computed_are_no_silent_promise() -> None:
    with pytest.raises(ConfigError, match="xxh3 needs KV in host memory, here it is on cuda:1"):
        offered_checksum(TransferConfig(checksum="xxh3"), MemoryRegion(0, 8, "cuda:1"))


# --- transfers -----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(("source", "target"), [(LAYOUT, LAYOUT), (LAYOUT, LARGE), (LARGE, LAYOUT)])
async def test_blocks_that_arrive_as_sent_complete(source: KvLayout, target: KvLayout) -> None:
    async with transfer_pair(config=CHECKED, source=source, target=target) as pair:
        num_tokens = 41
        ids = list(range(20, 20 + -(-num_tokens // target.block_size)))
        send, receive = pair.open(ids, num_tokens=num_tokens)
        first = 32 // target.block_size
        own = blocks(*range(7, 7 + -(-num_tokens // source.block_size)))
        for start, stop in ((0, first), (first, len(ids))):
            held = send.source_blocks(start, stop)
            source_ids = own[held.start : held.stop]
            send.push(start, source_ids, stop == len(ids), num_blocks=stop - start)
            await pair.drive()
        await receive.wait_complete()
        assert pair.decode.observer.num_corrupt == 0
        assert (receive.state, send.state) == (ReceiveState.COMPLETE, SendState.DONE)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("target", "fault", "num_corrupt"),
    [(LAYOUT, "flip", 1), (LAYOUT, "corrupt", 2), (LARGE, "flip", 1), (LARGE, "corrupt", 1)],
)
async def test_damage_on_the_way_fails_the_transfer(
    target: KvLayout, fault: str, num_corrupt: int
) -> None:
    async with transfer_pair(f"1:{fault}", config=CHECKED, target=target) as pair:
        send, receive = pair.open([5, 9, 10])
        per_block = target.block_size // LAYOUT.block_size
        send.push(0, blocks(*range(1, 1 + per_block)), is_last=False, num_blocks=1)
        send.push(1, blocks(*range(9, 9 + 2 * per_block)), is_last=True, num_blocks=2)
        await pair.drive()
        with pytest.raises(ChecksumError, match=f"chunk 1: {num_corrupt} of 2 blocks"):
            await receive.wait_complete()
        assert receive.state is ReceiveState.FAILED
        assert receive.proof is Proof.ALL_ARRIVED  # all of it is there, and wrong
        assert pair.decode.observer.num_corrupt == num_corrupt
        assert pair.decode.observer.ignored == []
        pair.assert_idle()


@pytest.mark.asyncio
async def test_without_checksums_a_flipped_byte_goes_unnoticed() -> None:
    """What the checksum is for; and that the script changes exactly one byte."""
    async with transfer_pair("0:flip") as pair:
        send, receive = pair.open([5, 9])
        source = pair.prefill.memory.copy()
        send.push(0, blocks(3, 4), is_last=True)
        await pair.drive()
        await receive.wait_complete()
        differing = pair.decode.blocks(blocks(5, 9)) != pair.prefill.blocks(blocks(3, 4))
        assert np.argwhere(differing).tolist() == [[0, 0]]
        assert (pair.prefill.memory == source).all()


@pytest.mark.asyncio
async def test_a_chunk_without_its_checksums_fails_the_transfer() -> None:
    async with transfer_pair(config=CHECKED) as pair:
        _, receive = pair.open([5, 9])
        note = Notification(receive.ticket.transfer_id, 0, 0, 1, 0, 1)
        pair.prefill.connector.post_write(PeerName("decode-0@1"), (), note.encode())
        await pair.decode.manager.sweep_once()
        with pytest.raises(TransferError, match="0 checksums, the ticket says xxh3"):
            await receive.wait_complete()
        receive.peer_quiesced()


@pytest.mark.asyncio
async def test_a_side_that_computes_none_is_not_asked_for_any() -> None:
    async with transfer_pair(config=CHECKED) as pair:
        plain = type(pair.prefill)("prefill-1", 1, pair.fabric, pair.clock, config=CONFIG)
        try:
            await plain.manager.complete(await pair.decode.manager.answer(plain.manager.offer()))
            assert pair.decode.manager.checksum_with(pair.prefill.ref) is Checksum.XXH3
            assert pair.decode.manager.checksum_with(plain.ref) is Checksum.NONE
            assert plain.manager.checksum_with(pair.decode.ref) is Checksum.NONE
        finally:
            await plain.manager.close()
