"""How KV moves between instances, and what happens when it does not."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from isthmus.common.config_node import Node

ConnectorName = Literal["nixl", "ucx", "shm", "collective", "local", "fake"]
AUTO_CONNECTORS: tuple[ConnectorName, ...] = ("nixl", "ucx", "shm", "collective")
"""What ``transfer.connector: auto`` stands for, where it can run (ucx: where nixl cannot)."""
UCX_CONNECTORS: frozenset[ConnectorName] = frozenset({"nixl", "ucx"})
"""Each brings a UCX of its own, and a process can have one."""


class TransferConfig(Node):
    connector: Literal["auto"] | ConnectorName | list[ConnectorName] = Field(
        "auto",
        description="what may move KV: one connector or a list; two instances use the best that "
        "both have (docs/kv-transfer.md); auto = all but local (within one process) and fake "
        "(faults by script), and ucx only where nixl cannot run: not both in one process",
    )
    deadline_ms: int = Field(
        30_000,
        ge=1,
        description="longest time without progress of KV that is being sent; a prompt may wait and "
        "be computed as long as its request's deadline allows",
    )
    handshake_timeout_ms: int = Field(
        5_000, ge=1, description="longest time for two instances to meet"
    )
    hold_ms: int = Field(
        60_000, ge=1, description="longest time blocks are kept for a peer after the first token"
    )
    peer_grace_ms: int = Field(
        60_000,
        ge=1,
        description="an instance that the registry has not listed for so long, and with which "
        "nothing is open, is forgotten with all that is kept for it: its mapped memory, its "
        "connector's descriptors, its channel",
    )
    quarantine_ms: int = Field(5_000, ge=0, description="rest after a transfer of unknown end")
    checksum: Literal["auto", "none", "xxh3"] = Field(
        "auto",
        description="compare every block that arrives with what was sent; auto = xxh3 where KV is "
        "in host memory",
    )
    on_failure: Literal["fail", "reprefill", "recompute"] = Field(
        "reprefill",
        description="when a prompt could not be computed or moved, and the request's class does "
        "not say: fail the request, try the other prefill instance that the router names, while "
        "there is time and no token is out, or compute it on the decode instance at once (which is "
        "also what follows when the other fails, or there is none)",
    )
    fetch_min_tokens: int = Field(
        64,
        ge=0,
        description="a prefill instance asks the decode instance for KV of a prompt's first tokens "
        "when that saves it computing so many of them (a conversation's last answer, say); "
        "0 = never",
    )
    fetch_timeout_ms: int = Field(
        2_000,
        ge=1,
        description="longest wait for such KV before the prompt is computed without it; a peer "
        "that is well sends it within milliseconds",
    )
    layers_per_push: int = Field(
        0,
        ge=0,
        description="layers whose KV leaves together while a prompt's later layers are computed; "
        "0 = as many as make 1 MiB; as many as the model has, or more = whole blocks after a step",
    )
    canary_every: int = Field(
        0,
        ge=0,
        description="every how many-th greedy request that was served with KV from elsewhere is "
        "computed again on its decode instance, when that is idle, and compared; 0 = none",
    )
    staging_mib: int = Field(
        32,
        ge=1,
        description="memory of a prefill instance for KV that is converted to another dtype on its "
        "way; it bounds what is under way at a time",
    )
    fault_script: str = Field("", description="scripted faults of the fake connector (tests)")

    @property
    def named_connectors(self) -> tuple[ConnectorName, ...]:
        """Those that the configuration names; none for ``auto``."""
        if self.connector == "auto":
            return ()
        return tuple(self.connector) if isinstance(self.connector, list) else (self.connector,)

    @property
    def needs_shared_memory(self) -> bool:
        """True where peers must be able to map the KV blocks."""
        return "shm" in self.named_connectors or self.fault_script.startswith("shm|")

    @model_validator(mode="after")
    def _names_one(self) -> TransferConfig:
        if isinstance(self.connector, list) and not self.connector:
            raise ValueError("connector: an empty list leaves nothing to move KV with")
        if UCX_CONNECTORS.issubset(self.named_connectors):
            raise ValueError(
                "connector: nixl and ucx cannot share a process, since each brings a UCX of its "
                "own; name one of them"
            )
        return self
