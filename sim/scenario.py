"""A scenario: what is simulated, as one file says it. Validated; builds nothing.

Pools of instances, a workload, classes of service, tenants, faults, and the router's own settings.
Files named in a scenario are looked for beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isthmus.common.cluster import Role
from isthmus.common.config import RouterConfig
from isthmus.common.errors import ConfigError
from isthmus.common.types import Slo
from isthmus.sim.spec import Batching


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelPart(_Part):
    """Coefficients of ``sim.step_model.StepModel`` (milliseconds)."""

    prefill_base: float = Field(5.0, ge=0)
    prefill_token: float = Field(1.0, gt=0)
    prefill_pair: float = Field(0.0, ge=0)
    decode_base: float = Field(20.0, gt=0)
    decode_seq: float = Field(1.0, ge=0)
    decode_context: float = Field(0.0, ge=0)


class ProfilePart(_Part):
    """Where an instance's speed comes from. ``scale`` multiplies every time."""

    kind: Literal["coefficients", "distserve", "splitwise", "isthmus"] = "coefficients"
    coefficients: ModelPart = ModelPart()
    file: Path | None = Field(None, description="of every kind but coefficients")
    model: str = ""
    hardware: str = ""
    scale: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _has_a_file(self) -> ProfilePart:
        if (self.file is None) != (self.kind == "coefficients"):
            raise ValueError(f"profile kind {self.kind}: file is for the other kinds")
        return self


class PoolPart(_Part):
    """Alike instances. 0 = from the profile, where that knows it, else a usual value."""

    role: Role
    count: int = Field(1, ge=1)
    tp: int = Field(1, ge=1, description="GPUs of one instance")
    profile: ProfilePart = ProfilePart()
    batching: Batching = Batching.CHUNKED
    block_size: int = Field(0, ge=0)
    num_blocks: int = Field(0, ge=0)
    kv_token_bytes: int = Field(0, ge=0)
    max_num_batched_tokens: int = Field(0, ge=0)
    max_num_seqs: int = Field(0, ge=0)
    max_model_len: int = Field(0, ge=0)
    link_gb_per_s: float = Field(25.0, gt=0, description="of an instance, in each direction")
    prefix_cache: bool = True
    fetch_min_tokens: int = Field(
        64, ge=0, description="as `transfer.fetch_min_tokens`, of prefill instances; 0 = never"
    )
    believed_scale: float = Field(
        1.0, gt=0, description="the router is told times that are this much longer than true"
    )


class WorkloadPart(_Part):
    """A trace, or calls made up. ``rate`` 0 = a trace's own. ``copies`` repeats a trace, each copy
    with prefixes of its own, so that a fast replay still lasts."""

    trace: Path | None = None
    requests: int = Field(1_000, ge=0, description="of a trace: at most, 0 = all of them")
    copies: int = Field(1, ge=1)
    rate: float = Field(0.0, ge=0)
    cv: float = Field(1.0, ge=0)
    prompt: str = "lognormal:512:0.8"
    answer: str = "lognormal:128:0.8"
    turns: int = Field(1, ge=1, description="calls of one conversation (made up)")
    think_s: float = Field(10.0, ge=0, description="mean pause between them")
    max_output: int = Field(2_048, ge=1, description="what clients allow")
    max_tokens: int = Field(0, ge=0, description="longer calls are left out; 0 = none are")

    @model_validator(mode="after")
    def _has_a_rate(self) -> WorkloadPart:
        if self.trace is None and not (self.rate and self.requests):
            raise ValueError("a workload that is made up needs rate and requests")
        return self


class ClassPart(_Part):
    """A class of service; ``share`` of the calls that name none."""

    share: float = Field(1.0, gt=0)
    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)
    e2e_ms: float | None = Field(None, gt=0)
    quantile: float = Field(0.9, gt=0, lt=1)
    weight: float = Field(1.0, gt=0)
    strict: bool = False

    def slo(self, name: str) -> Slo:
        return Slo(
            class_name=name,
            ttft_ms=self.ttft_ms,
            tpot_ms=self.tpot_ms,
            e2e_ms=self.e2e_ms,
            quantile=self.quantile,
            weight=self.weight,
            is_strict=self.strict,
        )


class FaultPart(_Part):
    """``kill``: the instance dies and comes back after ``for_s`` (0 = never). ``slow``: its steps
    take ``factor`` times as long for ``for_s`` (0 = for good, or until it dies)."""

    kind: Literal["kill", "slow"]
    instance: str
    at_s: float = Field(ge=0)
    for_s: float = Field(0.0, ge=0)
    factor: float = Field(2.0, gt=0)


class Scenario(_Part):
    name: str = "scenario"
    seed: int = 0
    pools: list[PoolPart] = Field(min_length=1)
    workload: WorkloadPart
    classes: dict[str, ClassPart] = Field(default_factory=lambda: {"default": ClassPart()})
    tenants: dict[str, float] = Field(default_factory=dict, description="name: share of the calls")
    tenant_weights: dict[str, float] = Field(default_factory=dict, description="of fair shares")
    faults: list[FaultPart] = Field(default_factory=list)
    cancel_share: float = Field(0.0, ge=0, le=1)
    patience_s: float = Field(10.0, gt=0)
    router: RouterConfig = RouterConfig()
    report_interval_ms: float = Field(0.0, ge=0, description="0 = 100, more for large clusters")
    dispatch_ms: float = Field(1.0, ge=0, description="from the gateway to an instance's queue")
    delivery_ms: float = Field(0.0, ge=0, description="from the end of a step to the client")
    transfer_setup_ms: float = Field(2.0, ge=0)
    noise: float = Field(0.0, ge=0, description="of steps: deviation of the logarithm")
    warm_up: float = Field(0.0, ge=0, lt=1, description="share of the calls that is not counted")

    @model_validator(mode="after")
    def _has_somebody_to_decode(self) -> Scenario:
        if all(pool.role is Role.PREFILL for pool in self.pools):
            raise ValueError("pools: no decode or mixed instances")
        if not self.classes:
            raise ValueError("classes: at least one")
        return self

    @property
    def num_instances(self) -> int:
        return sum(pool.count for pool in self.pools)

    @property
    def num_gpus(self) -> int:
        return sum(pool.count * pool.tp for pool in self.pools)


def read_scenario(file: Path) -> Scenario:
    """Raises ConfigError with one line a problem."""
    try:
        tree = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", stage="scenario") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}", stage="scenario") from error
    return parse_scenario(tree, file.parent, str(file))


def parse_scenario(tree: object, folder: Path, source: str = "scenario") -> Scenario:
    """``folder``: where relative files are looked for. Raises ConfigError."""
    try:
        scenario = Scenario.model_validate(tree)
    except ValidationError as error:
        lines = [
            f"{source}: {'.'.join(map(str, item['loc'])) or 'scenario'}: {item['msg']}"
            for item in error.errors()
        ]
        raise ConfigError("\n".join(lines), stage="scenario") from error
    return _beside(scenario, folder)


def _beside(scenario: Scenario, folder: Path) -> Scenario:
    pools = []
    for pool in scenario.pools:
        file = pool.profile.file
        if file is not None:
            profile = pool.profile.model_copy(update={"file": folder / file})
            pools.append(pool.model_copy(update={"profile": profile}))
        else:
            pools.append(pool)
    workload = scenario.workload
    if workload.trace is not None:
        workload = workload.model_copy(update={"trace": folder / workload.trace})
    return scenario.model_copy(update={"pools": pools, "workload": workload})
