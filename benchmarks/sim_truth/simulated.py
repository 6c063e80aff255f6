"""The simulated side: a scenario made of saved profiles, and the live run's own calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.common.profile import InstanceProfile
from isthmus.loadgen import Targets
from isthmus.sim import Scenario, SimReport, parse_scenario, run_scenario
from isthmus.workload import Call


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a request loses outside steps and waits, milliseconds: before it is in the queue of the
    instance that computes its prompt, from the end of a step to the client, and for its KV."""

    dispatch_ms: float = 1.0
    delivery_ms: float = 0.0
    transfer_ms: float = 2.0

    @classmethod
    def of(cls, lone: Mapping[str, float], loaded: Mapping[str, float]) -> Overheads:
        """From means of the gateway's stages. A lone call's queue has nobody in it."""
        return cls(
            dispatch_ms=loaded["tokenise"] + loaded["admit"] + lone["queue"],
            delivery_ms=loaded["first_flush"],
            transfer_ms=loaded["transfer"],
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scenario needs beside profiles."""

    policy: str
    targets: Targets
    seed: int
    overheads: Overheads = Overheads()


def save_profiles(profiles: Mapping[str, InstanceProfile], folder: Path) -> list[Path]:
    """One file an instance, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, profile in sorted(profiles.items()):
        files.append(folder / f"{name}.json")
        files[-1].write_text(profile.to_json(), "utf-8")
    return files


def scenario_of(
    profiles: Mapping[str, InstanceProfile], files: Sequence[Path], setting: Setting
) -> Scenario:
    """One pool an instance, as its profile says."""
    pools: list[dict[str, Any]] = [
        {"role": profile.role.value, "profile": {"kind": "isthmus", "file": str(file.absolute())}}
        for (_, profile), file in zip(sorted(profiles.items()), files, strict=True)
    ]
    targets = setting.targets
    tree = {
        "name": "as live",
        "seed": setting.seed,
        "pools": pools,
        "workload": {"rate": 1.0, "requests": 1},  # takes the place of the calls that are given
        "classes": {"default": {"ttft_ms": targets.ttft_ms, "tpot_ms": targets.tpot_ms}},
        "router": {"policy": setting.policy},
        "dispatch_ms": setting.overheads.dispatch_ms,
        "delivery_ms": setting.overheads.delivery_ms,
        "transfer_setup_ms": setting.overheads.transfer_ms,
    }
    return parse_scenario(tree, Path())


def simulate(scenario: Scenario, calls: Sequence[Call]) -> SimReport:
    return run_scenario(scenario, list(calls)).report
