"""Ports of a gateway: its own, and one that it may share with others."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from isthmus.common.config import GatewayConfig
from isthmus.common.errors import ConfigError
from isthmus.gateway.server import bind_socket, bind_sockets
from tests.support.ipv6 import needs_ipv6


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def test_gateways_have_a_port_each_and_one_in_common() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(bind_socket("127.0.0.1", 0, 1_000, is_shared=True))
        config = GatewayConfig(port=0, shared_port=port_of(first))
        own, shared = (stack.enter_context(listener) for listener in bind_sockets(config))
        assert port_of(shared) == port_of(first) != port_of(own)
        for port in (port_of(own), port_of(shared)):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))


def test_without_a_shared_port_there_is_one_listener() -> None:
    (own,) = bind_sockets(GatewayConfig(port=0))
    own.close()


def test_a_port_of_somebody_else_is_not_shared() -> None:
    with bind_socket("127.0.0.1", 0, 1_000) as taken:
        config = GatewayConfig(port=0, shared_port=port_of(taken))
        with pytest.raises(ConfigError, match=r"choose another gateway\.shared_port"):
            bind_sockets(config)
        with pytest.raises(ConfigError, match=r"choose another gateway\.port"):
            bind_socket("127.0.0.1", port_of(taken), 1_000)


@needs_ipv6
def test_a_gateway_may_listen_on_ipv6() -> None:
    (own,) = bind_sockets(GatewayConfig(host="[::1]", port=0))
    with own, socket.create_connection(("::1", port_of(own)), 20):
        assert own.getsockname()[0] == "::1"


def test_a_host_that_nobody_knows_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid: "):
        bind_sockets(GatewayConfig(host="no.such.host.invalid", port=0))
