"""Connector name → implementation, imported only when it is the one in use."""

from __future__ import annotations

from isthmus.common.config import TransferConfig
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.interface import Connector


def create_connector(
    config: TransferConfig, me: InstanceRef, block_bytes: int, tp_rank: int = 0
) -> Connector:
    """The connector that the configuration names. Its agent is named after instance, epoch, rank.

    ``block_bytes`` is the granularity of most writes. Raises ConfigError for a fault script that
    cannot be read and TransferError when the connector cannot run here.
    """
    agent_name = f"{me.instance_id}@{me.epoch}" + (f"/{tp_rank}" if tp_rank else "")
    if config.connector == "nixl":
        return _nixl(agent_name, block_bytes)
    if config.connector == "local":
        return _local(agent_name)
    from isthmus.kvtransfer.connectors.fake import FakeConnector, parse_script

    inner_name, faults = parse_script(config.fault_script)
    inner = _nixl(agent_name, block_bytes) if inner_name == "nixl" else _local(agent_name)
    return FakeConnector(inner, faults)


def _local(agent_name: str) -> Connector:
    from isthmus.kvtransfer.connectors.local import LocalConnector

    return LocalConnector(agent_name)


def _nixl(agent_name: str, block_bytes: int) -> Connector:
    from isthmus.kvtransfer.connectors.nixl import NixlConnector

    return NixlConnector(agent_name, block_bytes)
