"""What `isthmus status` says of who decides."""

from __future__ import annotations

import pytest

from isthmus.cli.commands.status import is_leaderless
from isthmus.controlplane.client import ClusterStatus, FrontStatus


def front(name: str, kind: str, *, is_leading: bool) -> FrontStatus:
    has_router = kind == "router" or is_leading
    return FrontStatus(name, kind, 1, 0, "", "127.0.0.1:1", has_router, is_leading)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([], False),
        ([front("gateway-0", "gateway", is_leading=True)], False),
        ([front("gateway-0", "gateway", is_leading=False)], False),  # it embeds its router
        (
            [
                front("gateway-0", "gateway", is_leading=False),
                front("router-0", "router", is_leading=True),
                front("router-1", "router", is_leading=False),
            ],
            False,
        ),
        (
            [
                front("gateway-0", "gateway", is_leading=False),
                front("router-0", "router", is_leading=False),
            ],
            True,
        ),
    ],
)
def test_a_cluster_is_without_a_leader_when_none_of_its_router_processes_leads(
    processes: list[FrontStatus], expected: bool
) -> None:
    cluster = ClusterStatus("isthmus", "tiny", "http://x", (), tuple(processes))
    assert is_leaderless(cluster) is expected
