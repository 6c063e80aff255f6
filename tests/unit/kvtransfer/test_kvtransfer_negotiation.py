"""Which connector a pair uses: pure choices, the same on both sides."""

from __future__ import annotations

import itertools

import pytest

from isthmus.common.errors import HandshakeError
from isthmus.common.ids import InstanceId
from isthmus.common.transfer import ConnectorOffer, RankEndpoint, TransferOffer
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.handshake import make_offer
from isthmus.kvtransfer.negotiation import negotiate
from tests.support.transfer_pair import LAYOUT

NIXL, RDMA = ConnectorOffer("nixl", b""), ConnectorOffer("nixl", b"", is_direct=True)
SHM, SHM_ELSEWHERE = ConnectorOffer("shm", b"", "here"), ConnectorOffer("shm", b"", "there")
UCX, UCX_RDMA = ConnectorOffer("ucx", b""), ConnectorOffer("ucx", b"", is_direct=True)
COLLECTIVE = ConnectorOffer("collective", b"", "cpu")
COLLECTIVE_ON_GPU = ConnectorOffer("collective", b"", "cuda")


def offer(instance_id: str, *ranks: tuple[ConnectorOffer, ...]) -> TransferOffer:
    ref = InstanceRef(InstanceId(instance_id), 1, "127.0.0.1:1")
    return make_offer(
        ref, [RankEndpoint(rank, has, 0, 1, 1, LAYOUT) for rank, has in enumerate(ranks)]
    )


def both_ways(ours: TransferOffer, theirs: TransferOffer) -> str:
    chosen = {negotiate(ours, theirs), negotiate(theirs, ours)}
    assert len(chosen) == 1, chosen
    return chosen.pop()


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        ((RDMA, SHM, COLLECTIVE), (RDMA, SHM, COLLECTIVE), "nixl"),
        ((NIXL, SHM, COLLECTIVE), (RDMA, SHM, COLLECTIVE), "shm"),
        ((NIXL, SHM, COLLECTIVE), (NIXL, SHM_ELSEWHERE, COLLECTIVE), "nixl"),
        ((NIXL, COLLECTIVE), (COLLECTIVE, NIXL), "nixl"),
        ((SHM, COLLECTIVE), (NIXL, SHM_ELSEWHERE, COLLECTIVE), "collective"),
        ((UCX_RDMA, SHM, COLLECTIVE), (UCX_RDMA, SHM, COLLECTIVE), "ucx"),
        ((UCX, SHM, COLLECTIVE), (UCX_RDMA, SHM, COLLECTIVE), "shm"),
        ((UCX, COLLECTIVE), (UCX_RDMA, SHM, COLLECTIVE), "ucx"),
        ((NIXL, SHM, COLLECTIVE), (UCX, SHM_ELSEWHERE, COLLECTIVE), "collective"),
    ],
)
def test_best_that_both_can_use_together(
    ours: tuple[ConnectorOffer, ...], theirs: tuple[ConnectorOffer, ...], chosen: str
) -> None:
    assert both_ways(offer("a", ours), offer("b", theirs)) == chosen


def test_order_of_an_offer_does_not_matter() -> None:
    every = (RDMA, SHM, COLLECTIVE)
    for ours, theirs in itertools.product(itertools.permutations(every), repeat=2):
        assert negotiate(offer("a", ours), offer("b", theirs)) == "nixl"


def test_all_ranks_use_one_connector() -> None:
    """One rank without shared memory, or elsewhere, or without RDMA, decides for all."""
    full = offer("a", *[(RDMA, SHM, COLLECTIVE)] * 2)
    assert both_ways(full, offer("b", (RDMA, SHM), (NIXL, SHM))) == "shm"
    assert both_ways(full, offer("b", (NIXL, SHM), (NIXL, SHM_ELSEWHERE))) == "nixl"
    assert both_ways(full, offer("b", (NIXL, COLLECTIVE), (COLLECTIVE,))) == "collective"


def test_refusal_names_both_lists_and_what_stands_in_the_way() -> None:
    ours, theirs = offer("a", (NIXL, SHM)), offer("b", (SHM_ELSEWHERE, COLLECTIVE))
    with pytest.raises(HandshakeError) as refused:
        negotiate(ours, theirs)
    assert refused.value.message == (
        "no connector in common: nixl, shm here, shm, collective at b; shm needs one host, user "
        "and network namespace (here here, there there)"
    )
    with pytest.raises(HandshakeError, match="collective needs one kind of memory"):
        negotiate(offer("a", (COLLECTIVE,)), offer("b", (COLLECTIVE_ON_GPU,)))


def test_unknown_names_of_a_newer_peer_are_passed_over() -> None:
    newer = ConnectorOffer("teleport", b"")
    assert both_ways(offer("a", (newer, NIXL)), offer("b", (newer, NIXL))) == "nixl"
    with pytest.raises(HandshakeError, match="none here"):
        negotiate(offer("a", (newer,)), offer("b", (newer,)))
