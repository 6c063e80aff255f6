"""Where the servers of a benchmark listen."""

from __future__ import annotations

import socket

from benchmarks.cluster import free_ports


def test_ports_that_are_chosen_together_differ_and_can_be_had() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    with socket.create_server(("127.0.0.1", ports[0])) as server:
        assert server.getsockname()[1] == ports[0]
