"""What a cluster says of itself while it starts, runs and stops. Rendering is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    CHECK = "check"
    START = "start"
    INSTANCE = "instance"
    WARNING = "warning"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Progress:
    stage: Stage
    message: str


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class ReadyInstance:
    instance_id: str
    role: str
    address: str
    metrics_address: str
    pid: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ReadyCluster:
    """A cluster at the moment it became ready."""

    cluster: str
    url: str
    model: str
    pid: int
    log_dir: str
    state_dir: str
    """Folder by which other commands find the cluster."""
    seconds: float
    instances: tuple[ReadyInstance, ...]
    other_urls: tuple[str, ...] = ()
    """Of the gateways behind the first."""
