"""`isthmus status`: instances, their load, and whether the gateway admits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
from rich.markup import escape
from rich.table import Table

from isthmus.cli.options import DEFAULT_CLUSTER, ClusterName, Output, StateDir, running_cluster
from isthmus.cli.output import OutputFormat, print_json, print_table, stdout, table
from isthmus.common.cluster import InstanceInfo
from isthmus.common.ids import InstanceId
from isthmus.controlplane.actuators.base import ProcessKind
from isthmus.controlplane.client import ClusterStatus, InstanceStatus, cluster_status
from isthmus.router.pairing import pairing_problems


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    is_alive: bool
    is_ready: bool


@dataclass(frozen=True, slots=True)
class Status:
    cluster: ClusterStatus
    gateway: GatewayStatus
    problems: dict[InstanceId, str]  # of instances that no other may hand KV to, or take it from


def status(
    name: ClusterName = DEFAULT_CLUSTER,
    state_dir: StateDir = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show a running cluster."""
    state = running_cluster(name, state_dir)
    cluster = asyncio.run(cluster_status(state.control_address))
    infos = [item.info for item in cluster.instances if item.info is not None]
    found = Status(cluster, gateway_status(cluster.gateway_url), pairing_problems(infos))
    if output is OutputFormat.JSON:
        print_json(found)
        return
    health = "ready" if found.gateway.is_ready else "not ready"
    health = health if found.gateway.is_alive else "does not answer"
    stdout.print(f"cluster  {escape(cluster.cluster)}")
    stdout.print(f"model    {escape(cluster.model)}")
    stdout.print(f"gateway  {escape(cluster.gateway_url)}  {health}")
    if len(cluster.front) > 1:
        print_table(front_table(cluster))
    if is_leaderless(cluster):
        stdout.print("no router leads: every gateway decides by itself, least loaded first")
    print_table(instance_table(cluster))
    for item in cluster.instances:
        if item.info is not None and item.info.kv_layout.tp_size > 1:
            stdout.print(describe_ranks(item.info))
    for line in describe_pairs(cluster):
        stdout.print(escape(line))
    for instance_id, problem in found.problems.items():
        stdout.print(f"{instance_id} has no partner: {escape(problem)}")
    ended = {item.instance_id: item.last_exit for item in cluster.instances}
    ended |= {item.name: item.last_exit for item in cluster.front}
    for ended_name, reason in ended.items():
        if reason:
            stdout.print(f"{ended_name} last ended: {escape(reason)}")


def is_leaderless(cluster: ClusterStatus) -> bool:
    """Routers are processes of their own, and none of them leads."""
    routers = [item for item in cluster.front if item.kind == ProcessKind.ROUTER.value]
    return bool(routers) and not any(item.is_leading for item in routers)


def describe_ranks(info: InstanceInfo) -> str:
    pids = ", ".join(map(str, info.rank_pids))
    return f"{info.instance_id} has tp_size {info.kv_layout.tp_size}; pids of its ranks: {pids}"


def describe_pairs(cluster: ClusterStatus) -> list[str]:
    """What KV goes over, one line for each two instances that have shaken hands."""
    pairs = {
        tuple(sorted((item.instance_id, peer))): connector
        for item in cluster.instances
        for peer, connector in item.connectors.items()
    }
    return [f"{one} – {other}: KV over {pairs[one, other]}" for one, other in sorted(pairs)]


def gateway_status(url: str) -> GatewayStatus:
    with httpx.Client(trust_env=False, timeout=3.0) as client:
        return GatewayStatus(_is_ok(client, f"{url}/health"), _is_ok(client, f"{url}/ready"))


def _is_ok(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def front_table(cluster: ClusterStatus) -> Table:
    """Gateways and routers, where there are several."""
    made = table("process", "address", "pid", "router", "restarts")
    for item in cluster.front:
        lead = ("leads" if item.is_leading else "stands by") if item.has_router else "–"
        address = item.address or "not up"
        made.add_row(item.name, address, str(item.pid or "–"), lead, str(item.num_restarts))
    return made


def instance_table(cluster: ClusterStatus) -> Table:
    made = table(
        "instance", "state", "epoch", "pid", "run", "wait", "KV used", "cached", "held", "step ms",
        "restarts",
    )  # fmt: skip
    made.padding = (0, 1, 0, 0)  # eighty columns are enough
    for item in cluster.instances:
        made.add_row(*instance_row(item))
    return made


def instance_row(item: InstanceStatus) -> list[str]:
    state, epoch = (item.info.state.value, str(item.info.epoch)) if item.info else ("not up", "–")
    load = item.load
    figures = ["–"] * 6
    if load is not None:
        figures = [
            str(load.running_seqs),
            str(load.waiting_seqs),
            f"{load.num_blocks - load.free_blocks}/{load.num_blocks}",
            str(load.cached_blocks),
            str(load.held_blocks),
            f"{load.step_ms:.1f}",
        ]
    identity = [item.instance_id, state, epoch, str(item.pid or "–")]
    return [*identity, *figures, str(item.num_restarts)]
