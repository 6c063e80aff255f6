"""A saved profile of an instance: how fast it is and how much it holds, measured once, used again.

`isthmus profile` writes one, the simulator and the planner load it. JSON with a version; unknown
keys are errors, so that a misspelt coefficient is not silently a default. Times are milliseconds,
sizes bytes, as in ``LatencyModel``.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from isthmus.common.cluster import LatencyModel, Role
from isthmus.common.config_node import Node
from isthmus.common.errors import ConfigError


class InstanceProfile(Node):
    version: Literal[1] = 1
    name: str = Field("", description="of the profile, for reports")
    model: str = ""
    hardware: str = Field("", description="for people; nothing is derived from it")
    role: Role = Role.MIXED
    tp_size: int = Field(1, ge=1, description="devices of one instance")
    latency: LatencyModel = LatencyModel()
    max_num_batched_tokens: int = Field(512, ge=1)
    max_num_seqs: int = Field(64, ge=1)
    max_model_len: int = Field(2**20, ge=2)
    num_blocks: int = Field(1_000, ge=1)
    block_size: int = Field(16, ge=1)
    kv_bytes_per_token: int = Field(0, ge=0)

    @field_validator("latency", mode="before")
    @classmethod
    def _knows_its_coefficients(cls, value: object) -> object:
        known = {field.name for field in fields(LatencyModel)}
        if isinstance(value, dict) and (unknown := value.keys() - known):
            raise ValueError(f"unknown coefficients {sorted(map(str, unknown))}")
        return value

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def read_profile(file: Path) -> InstanceProfile:
    """Raises ConfigError naming the file and what is wrong with it."""
    try:
        return InstanceProfile.model_validate_json(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", stage="profile") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'profile'}: {item['msg']}"
            for item in error.errors()
        )
        raise ConfigError(f"{file} is not a profile: {problems}", stage="profile") from error
