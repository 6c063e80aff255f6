"""What all processes share: how they find each other, start, end and log."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus.common.config_node import Host, Node


class RegistryConfig(Node):
    host: Host = Field("127.0.0.1", description="address on which the registry listens")
    port: int = Field(0, ge=0, le=65_535, description="0 = any free port")
    lease_ms: int = Field(
        5_000, ge=100, description="an instance that was silent for this long is gone"
    )


class LifecycleConfig(Node):
    drain_ms: int = Field(10_000, ge=0, description="how long a drain waits for running work")
    ready_timeout_ms: int = Field(
        120_000, ge=1, description="longest start of the cluster, and of a worker that restarts"
    )
    max_restarts: int = Field(-1, ge=-1, description="restarts of one worker; -1 = unlimited")
    actuator: Literal["ray", "process"] = Field(
        "ray", description="who starts and restarts workers: Ray actors, or plain processes"
    )
    ray_address: str = Field(
        "", description="a running Ray cluster to join, host:port or auto; empty = a private one"
    )


class LoggingConfig(Node):
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least serious messages that are logged"
    )
    format: Literal["json", "console"] = Field(
        "console", description="of the log files: one JSON object a line, or text for people"
    )
