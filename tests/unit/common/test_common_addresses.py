"""Hosts and ports, as they are written and listened on."""

from __future__ import annotations

import socket

import pytest

from isthmus.common.addresses import family_of, join_address, listen_on, split_address
from isthmus.common.config import ClusterConfig
from tests.support.ipv6 import needs_ipv6


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1:7000"),
        ("node-3", "node-3:7000"),
        ("fd00::1", "[fd00::1]:7000"),
        ("", ":7000"),
    ],
)
def test_an_address_is_joined_and_split(host: str, address: str) -> None:
    assert join_address(host, 7000) == address
    assert split_address(address) == (host, 7000)


@pytest.mark.parametrize("address", ["node-3", "fd00::1", "::1", "[fd00::1]", "node-3:x"])
def test_an_address_without_a_port_is_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|in brackets"):
        split_address(address)


def test_any_address_can_be_meant() -> None:
    assert family_of("") in (socket.AF_INET, socket.AF_INET6)
    assert family_of("::") is socket.AF_INET6


def test_a_name_with_addresses_of_both_kinds_means_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    with monkeypatch.context() as resolver:
        resolver.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        assert family_of("localhost") is socket.AF_INET


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_listening_is_on_that_host_alone(host: str) -> None:
    with listen_on(host) as listener:
        name, port = listener.getsockname()[:2]
        assert name == host
        with socket.create_connection((host, port), 20):
            pass


def test_brackets_are_left_out_of_a_configured_host() -> None:
    config = ClusterConfig.model_validate(
        {"host": "[::1]", "gateway": {"host": "::1"}, "registry": {"host": "[::1]"}}
    )
    assert {config.host, config.gateway.host, config.registry.host} == {"::1"}
