"""Classes of service and tenants, as an operator writes them down.

A class names targets and says how much they matter; a tenant is who sends requests, known by its
keys. A request belongs to one class and one tenant, and may bring targets of its own, which take
the place of its class's. The class ``default`` has none: requests that ask for nothing are served
as well as can be.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from isthmus.common.config_node import Node
from isthmus.common.types import Remedy, Slo

DEFAULT_CLASS = "default"
LabelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
"""Names that become labels of metrics and values of headers."""
ApiKey = Annotated[str, StringConstraints(min_length=1)]


class SloClassConfig(Node):
    ttft_ms: float | None = Field(None, gt=0, description="target of TTFT; none = no target")
    tpot_ms: float | None = Field(None, gt=0, description="target of TPOT; none = no target")
    e2e_ms: float | None = Field(None, gt=0, description="target of E2E; none = no target")
    quantile: float = Field(
        0.9, gt=0, lt=1, description="share of its requests that shall meet all their targets"
    )
    weight: float = Field(
        1.0, gt=0, description="what one of its good requests counts beside those of other classes"
    )
    mode: Literal["best_effort", "strict"] = Field(
        "best_effort",
        description="a request whose targets cannot be met: serve it when there is slack, or "
        "refuse it",
    )
    on_failure: Literal["fail", "reprefill", "recompute"] | None = Field(
        None,
        description="what happens when a prompt could not be computed or moved; none = as "
        "transfer.on_failure says",
    )

    def to_slo(self, class_name: str) -> Slo:
        return Slo(
            class_name=class_name,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            e2e_ms=self.e2e_ms,
            quantile=self.quantile,
            weight=self.weight,
            is_strict=self.mode == "strict",
            on_failure=Remedy(self.on_failure) if self.on_failure is not None else None,
        )


def _shipped_classes() -> dict[str, SloClassConfig]:
    return {
        DEFAULT_CLASS: SloClassConfig(),
        "interactive": SloClassConfig(ttft_ms=2_000, tpot_ms=100),
        "batch": SloClassConfig(ttft_ms=60_000, weight=0.25),
    }


class SloConfig(Node):
    default_class: str = Field(DEFAULT_CLASS, description="class of requests that name none")
    classes: dict[LabelName, SloClassConfig] = Field(
        default_factory=_shipped_classes, description="classes of service by name"
    )

    @model_validator(mode="after")
    def _default_is_known(self) -> SloConfig:
        if self.default_class not in self.classes:
            raise ValueError(f"default_class {self.default_class!r} is not one of slo.classes")
        return self

    def slo_of(self, class_name: str) -> Slo:
        """The class's targets. Raises KeyError for a class that is not configured."""
        return self.classes[class_name].to_slo(class_name)


class TenantConfig(Node):
    api_keys: list[ApiKey] = Field(default_factory=list, description="keys that it sends")
    key_hashes: list[str] = Field(
        default_factory=list,
        description="SHA-256 of such keys, 64 hexadecimal digits, where the file is not to hold "
        "the keys themselves",
    )
    weight: float = Field(
        1.0, gt=0, description="its share beside other tenants while requests wait"
    )
    max_inflight: int = Field(
        0, ge=0, description="more concurrent requests get 429; 0 = gateway.max_inflight alone"
    )
    default_class: str = Field(
        "", description="class of its requests that name none; empty = slo.default_class"
    )

    @field_validator("key_hashes")
    @classmethod
    def _are_digests(cls, hashes: list[str]) -> list[str]:
        for text in hashes:
            if len(text) != 64 or not set(text.lower()) <= set("0123456789abcdef"):
                raise ValueError("a key's hash has 64 hexadecimal digits")
        return [text.lower() for text in hashes]

    @property
    def all_hashes(self) -> list[str]:
        """Of the keys in either form."""
        return [*map(hash_key, self.api_keys), *self.key_hashes]


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
