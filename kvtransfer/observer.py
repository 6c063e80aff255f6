"""What a TransferManager reports, so that metrics can be counted without being known here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from isthmus.common.ids import InstanceId
from isthmus.kvtransfer.receive_session import Ignored

Side = Literal["send", "receive"]


class TransferObserver(Protocol):
    """Called on the manager's event loop; must not block or raise."""

    def session_ended(
        self, side: Side, state: str, connector: str, num_bytes: int, seconds: float
    ) -> None:
        """A session reached a terminal state, ``seconds`` after it was opened."""
        ...

    def notification_ignored(self, reason: Ignored) -> None: ...

    def links_measured(
        self, bytes_per_s: Mapping[InstanceId, float], connectors: Mapping[InstanceId, str]
    ) -> None:
        """How fast KV goes to each peer for which that is known, now, and over what."""
        ...

    def hopeless(self, connector: str) -> None:
        """A transfer was given up because its link is too slow for what is left of its time."""
        ...

    def blocks_corrupt(self, num_blocks: int, connector: str) -> None:
        """Blocks arrived whose checksums are not those that the sender computed."""
        ...


class SilentObserver:
    def session_ended(
        self, side: Side, state: str, connector: str, num_bytes: int, seconds: float
    ) -> None:
        pass

    def notification_ignored(self, reason: Ignored) -> None:
        pass

    def links_measured(
        self, bytes_per_s: Mapping[InstanceId, float], connectors: Mapping[InstanceId, str]
    ) -> None:
        pass

    def hopeless(self, connector: str) -> None:
        pass

    def blocks_corrupt(self, num_blocks: int, connector: str) -> None:
        pass
