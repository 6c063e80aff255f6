"""Whom a request meets first: the gateway, and the router that chooses its instances."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus.common.config_node import Host, Node


class RouterConfig(Node):
    policy: Literal[
        "goodput",
        "least_predicted_load",
        "round_robin",
        "least_loaded",
        "power_of_two",
        "prefix_only",
    ] = Field(
        "goodput",
        description="which pair of instances serves a request; goodput also decides when, and whom "
        "overload leaves out",
    )
    mode: Literal["auto", "embedded", "process"] = Field(
        "auto",
        description="where decisions are made: in each gateway, or in processes of their own of "
        "which one leads; auto = in the gateway where there is one, in processes where there are "
        "several",
    )
    replicas: int = Field(
        2, ge=1, description="router processes, where there are any: one leads, the others stand by"
    )
    min_remote_tokens: int = Field(
        17,
        ge=0,
        description="fewer uncached prompt tokens than this are computed on decode; 17 = what is "
        "left of a prompt of which every whole block of 16 is there",
    )
    index_max_blocks: int = Field(1_000_000, ge=1, description="bound of the prefix index")
    reservation_ttl_ms: int = Field(
        660_000,
        ge=1,
        description="when a decision of unknown outcome is written off; more than a request's "
        "deadline, else those that still wait are forgotten",
    )
    stale_load_ms: int = Field(2_000, ge=1, description="age after which a report is doubted")
    ageing_ms: int = Field(
        5_000,
        ge=0,
        description="wait of a request without a target, or behind it, after which it gets a share "
        "of the work whatever has targets (goodput)",
    )
    max_held: int = Field(
        4_096, ge=1, description="requests that wait in the router; more get 503 (goodput)"
    )
    exploration: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of decisions that go to any feasible pair, to learn of it (goodput)",
    )
    session_affinity_ms: float = Field(
        20.0,
        ge=0,
        description="what it is worth that a conversation goes on where its last turn was served; "
        "0 = nothing",
    )
    max_sessions: int = Field(65_536, ge=1, description="conversations that are remembered")
    breaker_failures: int = Field(3, ge=1, description="failures in a row that open a breaker")
    breaker_open_ms: int = Field(2_000, ge=1, description="pause before an instance is tried again")


class GatewayConfig(Node):
    host: Host = Field("127.0.0.1", description="address on which the gateway listens")
    port: int = Field(
        8000,
        ge=0,
        le=65_535,
        description="of the first gateway, the next ones have the ports after it; 0 = any free",
    )
    replicas: int = Field(1, ge=1, le=64, description="gateway processes")
    shared_port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="on which every gateway listens beside its own: the kernel divides new "
        "connections among them; 0 = none",
    )
    request_timeout_ms: int = Field(600_000, ge=1, description="deadline of one request")
    max_body_bytes: int = Field(16 * 2**20, ge=1, description="larger request bodies get 413")
    max_inflight: int = Field(1024, ge=1, description="more concurrent requests get 429")
    default_max_tokens: int = Field(
        0, ge=0, description="completion length when the client sets none; 0 = context length"
    )
    api_keys: list[str] = Field(default_factory=list, description="empty = no authentication")
    on_decode_loss: Literal["resume", "error"] = Field(
        "resume", description="what happens to a stream whose decode instance dies"
    )
    instance_wait_ms: int = Field(
        30_000,
        ge=0,
        description="longest wait for a decode or mixed instance to be ready when none is, before "
        "503; 0 = refuse at once",
    )
