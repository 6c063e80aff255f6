from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from isthmus.common.errors import HandshakeError, LayoutMismatchError, StaleEpochError
from isthmus.common.ids import InstanceId
from isthmus.common.kv_layout import KvLayout
from isthmus.common.transfer import ConnectorOffer, RankEndpoint, TransferOffer
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.handshake import check_epoch, check_offer, make_offer
from tests.support.transfer_pair import LAYOUT, ranked


def offer(instance_id: str = "decode-0", **changes: object) -> TransferOffer:
    ref = InstanceRef(InstanceId(instance_id), 3, "127.0.0.1:1")
    ranks = [rank_of(LAYOUT)]
    return replace(make_offer(ref, ranks), **changes)  # type: ignore[arg-type]


def rank_of(layout: KvLayout, num_blocks: int = 8) -> RankEndpoint:
    num_bytes = num_blocks * layout.block_bytes
    nixl = ConnectorOffer("nixl", b"md")
    return RankEndpoint(layout.tp_rank, (nixl,), 4096, num_bytes, num_blocks, layout)


OURS = offer("prefill-0")
# A model of one KV head: both ranks have it.
RANKS = tuple(map(rank_of, ranked(LAYOUT, 1, 2)))


def test_like_offers_match() -> None:
    check_offer(OURS, offer())


def test_version_is_looked_at_before_anything_else() -> None:
    unreadable = offer(protocol_version=2, layout_hash="?", ranks=())
    with pytest.raises(HandshakeError, match="version: 3 here, 2 at decode-0"):
        check_offer(OURS, unreadable)


def test_layout_is_looked_at_before_memory() -> None:
    other = replace(LAYOUT, kind="mla", head_dim=128)
    rank = replace(offer().ranks[0], layout=other, num_bytes=0)
    theirs = offer(layout_hash=other.compat_hash, ranks=(rank,))
    with pytest.raises(LayoutMismatchError, match="head_dim: 4 here, 128 there, kind: mha"):
        check_offer(OURS, theirs)


def test_a_dtype_that_only_the_peer_knows_is_refused_by_name() -> None:
    rank = replace(offer().ranks[0], layout=replace(LAYOUT, dtype="fp4"))
    with pytest.raises(LayoutMismatchError, match="there: dtype fp4 is not known here"):
        check_offer(OURS, offer(ranks=(rank,)))


def test_unlike_block_sizes_match() -> None:
    large = replace(LAYOUT, block_size=16)
    check_offer(OURS, offer(ranks=(rank_of(large, 2),)))


def test_unlike_numbers_of_ranks_match() -> None:
    check_offer(OURS, offer(ranks=RANKS))


@pytest.mark.parametrize(
    "ranks",
    [
        RANKS[:1],
        RANKS[::-1],
        (RANKS[0], RANKS[0]),
        (RANKS[0], replace(RANKS[1], tp_rank=0)),
        (RANKS[0], replace(RANKS[1], num_blocks=7)),
        (RANKS[0], replace(RANKS[1], layout=replace(RANKS[1].layout, block_size=8), num_blocks=4)),
    ],
    ids=["one missing", "order", "twice", "number", "blocks", "block size"],
)
def test_ranks_that_are_no_instance_are_refused(ranks: tuple[RankEndpoint, ...]) -> None:
    with pytest.raises(HandshakeError, match=r"decode-0 offers \d ranks, of which number"):
        check_offer(OURS, offer(ranks=ranks))


def _with_rank(**changes: object) -> TransferOffer:
    return offer(ranks=(replace(offer().ranks[0], **changes),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (lambda: offer("prefill-0"), "itself"),
        (lambda: offer(ranks=()), "no rank"),
        (lambda: _with_rank(num_blocks=9), "9 blocks"),
        (lambda: _with_rank(num_blocks=0), "0 blocks"),
    ],
)
def test_malformed_offers_are_refused(theirs: Callable[[], TransferOffer], message: str) -> None:
    with pytest.raises(HandshakeError, match=message):
        check_offer(OURS, theirs())


def test_hash_that_does_not_fit_the_fields_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="layout hash"):
        check_offer(OURS, offer(layout_hash="0" * 32))


def test_only_older_epochs_are_stale() -> None:
    known = offer().instance
    check_epoch(None, known)
    check_epoch(known, known)
    check_epoch(known, replace(known, epoch=4))
    with pytest.raises(StaleEpochError, match="epoch 2, but epoch 3"):
        check_epoch(known, replace(known, epoch=2))
