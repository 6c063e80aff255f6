"""`isthmus profile`: save how fast a running instance is, for the simulator and the planner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from isthmus.cli.options import DEFAULT_CLUSTER, ClusterName, Output, StateDir, running_cluster
from isthmus.cli.output import OutputFormat, print_json, stdout
from isthmus.common.clock import NS_PER_S, Clock, SystemClock
from isthmus.common.cluster import InstanceInfo, LatencyModel, LoadReport, StepTotals
from isthmus.common.errors import ConfigError
from isthmus.common.learned_latency import LearnedLatency
from isthmus.common.profile import InstanceProfile
from isthmus.controlplane.client import InstanceStatus, cluster_status

POLL_S = 0.5
PASSES = 5
"""Over what was watched: a minute of it is few samples for a fit that is made to follow changes."""


def profile(
    instance: Annotated[str, typer.Argument(help="Its name, as `isthmus status` shows it.")],
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Where to save it.")] = None,
    watch_s: Annotated[
        float,
        typer.Option(min=0, help="Seconds to watch its steps under load; 0 = the fit at boot."),
    ] = 0.0,
    name: ClusterName = DEFAULT_CLUSTER,
    state_dir: StateDir = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Save an instance's latency model and limits as a profile.

    The model is fitted when the instance starts, from short prompts and small batches. With
    --watch-s it is corrected by the steps that the instance makes meanwhile: give it load.
    """
    state = running_cluster(name, state_dir)
    info, latency, num_steps = asyncio.run(
        watch(state.control_address, instance, watch_s, SystemClock())
    )
    made = describe(info, latency)
    if file is not None:
        write(made, file)
    if output is OutputFormat.JSON:
        print_json(made.model_dump(mode="json"))
        return
    model = made.latency
    stdout.print(
        f"prefill  {model.prefill_base:.3g} ms a step, {model.prefill_token:.3g} ms a token, "
        f"{model.prefill_pair:.3g} ms a pair\n"
        f"decode   {model.decode_base:.3g} ms a step, {model.decode_seq:.3g} ms a sequence, "
        f"{model.decode_context:.3g} ms a token of context\n"
        f"steps    {num_steps} watched"
    )
    if file is not None:
        stdout.print(f"saved    {escape(str(file))}")


async def watch(
    control_address: str, instance: str, watch_s: float, clock: Clock
) -> tuple[InstanceInfo, LatencyModel, int]:
    """The instance's record, its model and the number of steps that corrected it.

    Raises ConfigError for an instance that is not there.
    """
    ends_ns = clock.monotonic_ns() + int(watch_s * NS_PER_S)
    seen: list[LoadReport] = []
    while True:
        info, found = _find((await cluster_status(control_address)).instances, instance)
        if found.load is not None:
            seen.append(found.load)
        if clock.monotonic_ns() >= ends_ns:
            num_steps = seen[-1].steps - seen[0].steps if seen else 0
            return info, fitted(info.latency, [load.totals for load in seen]), num_steps
        await asyncio.sleep(POLL_S)


def fitted(boot: LatencyModel, seen: Sequence[StepTotals]) -> LatencyModel:
    """``boot`` corrected by what an instance said of its steps, in the order in which it did."""
    learned = LearnedLatency(boot)
    for _ in range(PASSES):
        for totals in seen:
            learned.observe(totals)
    return learned.model


def _find(
    instances: tuple[InstanceStatus, ...], instance: str
) -> tuple[InstanceInfo, InstanceStatus]:
    for item in instances:
        if item.instance_id == instance and item.info is not None:
            return item.info, item
    known = ", ".join(item.instance_id for item in instances if item.info is not None)
    raise ConfigError(
        f"no instance {instance!r} is registered; there are {known or 'none'}", stage="profile"
    )


def describe(info: InstanceInfo, latency: LatencyModel) -> InstanceProfile:
    layout = info.kv_layout
    return InstanceProfile(
        name=info.instance_id,
        model=info.model,
        hardware=info.node,
        role=info.role,
        tp_size=layout.tp_size,
        latency=latency,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_num_seqs=info.max_num_seqs,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        block_size=layout.block_size,
        kv_bytes_per_token=layout.instance_token_bytes,
    )


def write(made: InstanceProfile, file: Path) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        file.write_text(made.to_json(), "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}", stage="profile") from error
