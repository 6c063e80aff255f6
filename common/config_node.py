"""What every level of the configuration tree is: frozen, and without keys that nobody knows."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from isthmus.common.addresses import without_brackets

Host = Annotated[str, AfterValidator(without_brackets)]
"""Of an IPv6 address the brackets may be written, and are left out."""


class Node(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
