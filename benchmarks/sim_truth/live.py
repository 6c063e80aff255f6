"""The live side: one prefill and one decode instance, their profiles, and calls at several rates.

Profiles are taken under load (a run of other calls at the middle rate, which the comparison does
not count) since that is how fast the instances are while gateway, client and both instances share
the machine. What a request loses on its way is taken from the gateway's stages: of that load, and
of calls that are alone, which wait for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import MODEL_NAME, VOCAB, Running, serve
from benchmarks.machine import ForeignCpu
from benchmarks.scrape import mean_stages, scrape
from isthmus.cli.commands.profile import describe, fitted
from isthmus.common.cluster import StepTotals
from isthmus.common.profile import InstanceProfile
from isthmus.loadgen import Endpoint, Record, Status, Targets, run_calls
from isthmus.loadgen.prompts import PromptMaker
from isthmus.workload import Call

REST_S = 1.0
LOOK_S = 0.5
NUM_LONE, LONE_S = 4, 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``calibration``: calls that the profiles are taken under. ``runs``: by their rate."""

    policy: str
    targets: Targets
    calibration: Sequence[Call]
    runs: dict[float, Sequence[Call]]
    seed: int


@dataclass(frozen=True, slots=True)
class Look:
    """What an instance said of its steps, ``at_s`` from the start of a run."""

    name: str
    at_s: float
    totals: StepTotals


@dataclass(frozen=True, slots=True)
class LiveRun:
    """``stages``: means of the gateway's stages, ms. ``boot``: the instances as they were fitted at
    their start; ``looks``: at their steps since, in order."""

    rate: float
    records: list[Record]
    stages: dict[str, float]
    boot: dict[str, InstanceProfile]
    looks: list[Look]
    foreign_cpu: float

    def steps(self, name: str) -> list[Look]:
        return [look for look in self.looks if look.name == name]

    def profiles(self) -> dict[str, InstanceProfile]:
        """As ``isthmus profile --watch-s`` would have saved them during the run."""
        return {
            name: boot.model_copy(
                update={"latency": fitted(boot.latency, [x.totals for x in self.steps(name)])}
            )
            for name, boot in self.boot.items()
        }

    def as_json(self) -> dict[str, Any]:
        made = asdict(self)
        made["boot"] = {name: item.model_dump(mode="json") for name, item in self.boot.items()}
        for row, record in zip(made["records"], self.records, strict=True):
            row["status"] = record.status.value
        return made

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> LiveRun:
        return cls(
            rate=tree["rate"],
            records=[
                Record(**{**row, "call": _call(row["call"]), "status": Status(row["status"])})
                for row in tree["records"]
            ],
            stages=tree["stages"],
            boot={name: InstanceProfile.model_validate(x) for name, x in tree["boot"].items()},
            looks=[Look(**{**x, "totals": StepTotals(**x["totals"])}) for x in tree["looks"]],
            foreign_cpu=tree["foreign_cpu"],
        )


def _call(tree: dict[str, Any]) -> Call:
    return Call(**{**tree, "blocks": tuple(tree["blocks"])})


@dataclass(frozen=True, slots=True)
class Live:
    """``lone``: calls one after another."""

    lone: LiveRun
    calibration: LiveRun
    runs: list[LiveRun]


def measure(
    model: Path | str, flags: Sequence[str], plan: Plan, on_run: Callable[[Live], None]
) -> Live:
    """``on_run`` hears of all that there is after each run."""
    with serve(model, *flags, "--set", f"router.policy={plan.policy}") as cluster:
        return asyncio.run(_measure(cluster, plan, on_run))


async def _measure(cluster: Running, plan: Plan, on_run: Callable[[Live], None]) -> Live:
    await run(cluster, 0.0, [Call(-1 - i, 0.0, 64, 4) for i in range(2)], plan, 0)
    lone = [Call(i, LONE_S * i, 64, 4) for i in range(NUM_LONE)]
    alone = await run(cluster, 1 / LONE_S, lone, plan, 1)
    calibration = await run(cluster, 0.0, plan.calibration, plan, 2)
    live = Live(alone, calibration, [])
    for number, (rate, calls) in enumerate(plan.runs.items()):
        await asyncio.sleep(REST_S)
        live.runs.append(await run(cluster, rate, calls, plan, 3 + number))
        on_run(live)
    return live


async def run(
    cluster: Running, rate: float, calls: Sequence[Call], plan: Plan, number: int
) -> LiveRun:
    """``number``: runs of different numbers have no prompt in common."""
    before = await scrape(cluster.url)
    boot: dict[str, InstanceProfile] = {}
    looks: list[Look] = []
    foreign = ForeignCpu()
    endpoint = Endpoint(cluster.url, MODEL_NAME, timeout_s=120, targets=plan.targets)
    async with endpoint:
        watcher = asyncio.create_task(_watch(cluster, boot, looks))
        try:
            prompts = PromptMaker(plan.seed + 1000 * number, VOCAB)
            records = await run_calls(endpoint, calls, prompts)
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
    foreign_share = foreign.share()
    stages = mean_stages(before, await scrape(cluster.url))
    return LiveRun(rate, records, stages, boot, looks, foreign_share)


async def _watch(cluster: Running, boot: dict[str, InstanceProfile], looks: list[Look]) -> None:
    """Fills both until it is cancelled. An instance that is too busy to answer is left out."""
    now_s = asyncio.get_running_loop().time
    start = now_s()
    while True:
        for item in await cluster.fetch_instances():
            if item.info is not None and item.load is not None:
                boot[item.instance_id] = describe(item.info, item.info.latency)
                looks.append(Look(item.instance_id, now_s() - start, item.load.totals))
        await asyncio.sleep(LOOK_S)
