"""`isthmus scale`: change the number of instances of one role."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from isthmus.cli.options import DEFAULT_CLUSTER, ClusterName, Output, StateDir, running_cluster
from isthmus.cli.output import OutputFormat, print_json, stdout
from isthmus.common.cluster import Role
from isthmus.controlplane import client


def scale(
    role: Annotated[Role, typer.Argument(help="prefill, decode or mixed.")],
    replicas: Annotated[int, typer.Argument(min=0, help="How many there shall be.")],
    name: ClusterName = DEFAULT_CLUSTER,
    state_dir: StateDir = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Start or drain instances until a role has the wanted number of them."""
    state = running_cluster(name, state_dir)
    old = asyncio.run(client.scale(state.control_address, role, replicas, state.drain_ms))
    if output is OutputFormat.JSON:
        print_json({"role": role, "old_replicas": old, "new_replicas": replicas})
    else:
        hint = "; isthmus status shows when they are ready" if replicas > old else ""
        stdout.print(f"{role.value}: {old} → {replicas}{hint}")
