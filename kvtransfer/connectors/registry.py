"""Connector name → implementation, imported only where it is in use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.common.addresses import split_address
from isthmus.common.config import AUTO_CONNECTORS, UCX_CONNECTORS, ConnectorName, TransferConfig
from isthmus.common.errors import TransferError
from isthmus.common.logging import get_logger
from isthmus.common.types import InstanceRef
from isthmus.kvtransfer.interface import Connector, MemoryRegion

_log = get_logger("kvtransfer")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What connectors are made for. ``block_bytes`` is the granularity of most writes, ``host`` the
    address under which peers reach this process."""

    agent_name: str
    region: MemoryRegion
    block_bytes: int
    host: str


def create_connectors(
    config: TransferConfig,
    me: InstanceRef,
    region: MemoryRegion,
    block_bytes: int,
    tp_rank: int = 0,
) -> tuple[Connector, ...]:
    """Those that the configuration names; for ``auto`` all that can run here. Their agents are
    named after instance, epoch and rank.

    Raises ConfigError for a fault script that cannot be read, and TransferError when a connector
    that is named cannot run here or none can.
    """
    agent_name = f"{me.instance_id}@{me.epoch}" + (f"/{tp_rank}" if tp_rank else "")
    here = Circumstances(agent_name, region, block_bytes, split_address(me.address)[0])
    if config.named_connectors:
        return tuple(_create(name, here, config) for name in config.named_connectors)
    made: list[Connector] = []
    obstacles = []
    for name in AUTO_CONNECTORS:
        obstacle = _obstacle(name, here, made)
        try:
            if not obstacle:
                made.append(_create(name, here, config))
        except TransferError as error:
            obstacle = error.message
        if obstacle:
            obstacles.append(f"{name}: {obstacle}")
    _log.info("connectors", offered=[connector.name for connector in made], without=obstacles)
    if not made:
        raise TransferError(f"nothing can move KV here: {'; '.join(obstacles)}", stage="register")
    return tuple(made)


def _create(name: ConnectorName, here: Circumstances, config: TransferConfig) -> Connector:
    if name != "fake":
        return _MAKERS[name](here)
    from isthmus.kvtransfer.connectors.fake import FakeConnector, parse_script

    inner, faults = parse_script(config.fault_script)
    return FakeConnector(_MAKERS[inner](here), faults)


def _obstacle(name: ConnectorName, here: Circumstances, made: Sequence[Connector]) -> str:
    """Why the connector is not tried; empty when it is."""
    if name == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        return "the wheel nixl-cu13 is not installed"
    if name == "ucx" and any(connector.name in UCX_CONNECTORS for connector in made):
        return "a process can have one UCX, which is nixl's here"
    if name == "ucx" and importlib.util.find_spec("ucxx") is None:
        return "the wheel ucxx-cu12 is not installed"
    if name == "shm" and here.region.fd < 0:
        return "the KV store is private memory"
    return ""


def _local(here: Circumstances) -> Connector:
    from isthmus.kvtransfer.connectors.local import LocalConnector

    return LocalConnector(here.agent_name)


def _nixl(here: Circumstances) -> Connector:
    from isthmus.kvtransfer.connectors.nixl import NixlConnector

    return NixlConnector(here.agent_name, here.block_bytes)


def _shm(here: Circumstances) -> Connector:
    from isthmus.kvtransfer.connectors.shm import ShmConnector

    return ShmConnector(here.agent_name)


def _ucx(here: Circumstances) -> Connector:
    from isthmus.kvtransfer.connectors.ucx import UcxConnector

    return UcxConnector(here.agent_name, here.host)


def _collective(here: Circumstances) -> Connector:
    from isthmus.kvtransfer.connectors.collective import CollectiveConnector

    return CollectiveConnector(here.agent_name, here.host)


_MAKERS: dict[str, Callable[[Circumstances], Connector]] = {
    "nixl": _nixl,
    "ucx": _ucx,
    "shm": _shm,
    "collective": _collective,
    "local": _local,
}
