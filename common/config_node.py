"""What every level of the configuration tree is: frozen, and without keys that nobody knows."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
