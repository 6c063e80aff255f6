"""Moves KV blocks from a prefill to a decode instance, and proves when they are safe to use.

Read in this order: ``interface`` (what a connector is), ``notification`` and ``plan`` (pure),
``send_session`` and ``receive_session`` (the two life cycles), ``lane`` and ``driver`` (the
connector's thread), ``rank_port`` (one rank, in this process or another), ``peers`` and ``manager``
(the tables). Nothing here knows the engine or RPC: workers join them.
"""

from isthmus.kvtransfer.connectors.registry import create_connectors
from isthmus.kvtransfer.interface import Connector, MemoryRegion
from isthmus.kvtransfer.manager import TransferManager
from isthmus.kvtransfer.observer import TransferObserver
from isthmus.kvtransfer.receive_session import ReceiveSession, ReceiveState
from isthmus.kvtransfer.send_session import SendSession, SendState

__all__ = [
    "Connector",
    "MemoryRegion",
    "ReceiveSession",
    "ReceiveState",
    "SendSession",
    "SendState",
    "TransferManager",
    "TransferObserver",
    "create_connectors",
]
