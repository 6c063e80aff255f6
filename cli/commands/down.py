"""`isthmus down`: stop a running cluster and wait until it is gone."""

from __future__ import annotations

from typing import Annotated

import typer

from isthmus.cli.options import DEFAULT_CLUSTER, ClusterName, Output, StateDir, running_cluster
from isthmus.cli.output import OutputFormat, print_json, stderr, stdout
from isthmus.controlplane.shutdown import end_cluster


def down(
    name: ClusterName = DEFAULT_CLUSTER,
    state_dir: StateDir = None,
    timeout: Annotated[float, typer.Option(help="Seconds until it is ended by force.")] = 60.0,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Stop a cluster: running requests may end first, then every process is gone."""
    state = running_cluster(name, state_dir)
    stderr.print(f"stopping {state.cluster} (pid {state.pid})")
    is_orderly = end_cluster(state, timeout)
    if output is OutputFormat.JSON:
        print_json({"cluster": state.cluster, "pid": state.pid, "is_orderly": is_orderly})
    else:
        stdout.print("stopped" if is_orderly else "ended by force: it did not stop in time")
    if not is_orderly:
        raise typer.Exit(1)
