"""Small scenarios and clusters for tests of the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.common.cluster import Role
from isthmus.common.config import RouterConfig
from isthmus.common.ids import BlockHash, InstanceId
from isthmus.sim import Scenario, parse_scenario
from isthmus.sim.cluster import ClusterSettings, SimCluster
from isthmus.sim.requests import SimRequest
from isthmus.sim.spec import InstanceSpec
from isthmus.sim.step_model import DecodeLine, StepModel

MODEL = StepModel(5.0, 0.1, 1e-5, DecodeLine(10.0, 0.1, 0.001))
MS = 1_000_000


def make_spec(name: str, role: Role, **changes: Any) -> InstanceSpec:
    values: dict[str, Any] = {"model": MODEL, "num_blocks": 1_000, "max_num_seqs": 16}
    return InstanceSpec(InstanceId(name), role, **(values | changes))


def make_cluster(*specs: InstanceSpec, **changes: Any) -> SimCluster:
    router = changes.pop("router", {"policy": "least_predicted_load", "min_remote_tokens": 0})
    return SimCluster(ClusterSettings(router=RouterConfig(**router), **changes), specs)


def make_request(
    index: int, at_ms: float = 0.0, prompt: int = 100, output: int = 10, **changes: Any
) -> SimRequest:
    values: dict[str, Any] = {"max_output": max(output, 64)}
    return SimRequest(index, round(at_ms * MS), prompt, output, **(values | changes))


def chain(count: int, first: int = 0) -> tuple[BlockHash, ...]:
    return tuple(BlockHash((first + place).to_bytes(16, "big")) for place in range(count))


def listen_always(cluster: SimCluster) -> None:
    """Somebody asks for each report when it is due."""
    queue, feed = cluster.queue, cluster.feed
    others = feed.on_due

    def on_due() -> None:
        plan()
        if others is not None:
            others()

    def plan() -> None:
        due_ns = feed.next_due_ns()
        assert due_ns is not None
        queue.at(due_ns, ask)

    def ask(_: None) -> None:
        feed.tell(queue.now_ns)
        plan()

    feed.on_due = on_due
    plan()


def make_scenario(**changes: Any) -> Scenario:
    """One mixed instance and a steady trickle, unless told otherwise."""
    tree: dict[str, Any] = {
        "pools": [{"role": "mixed", "profile": {"coefficients": {"prefill_token": 0.1}}}],
        "workload": {"rate": 2.0, "requests": 50, "prompt": "100-300", "answer": "5-20"},
    }
    return parse_scenario(tree | changes, Path())


def check_over(cluster: SimCluster) -> None:
    """Every request ended once and nobody owns anything any more."""
    assert cluster.is_done
    cluster.queue.run(until_ns=cluster.queue.now_ns + 10_000 * MS)  # steps that were under way
    assert all(record.end is not None for record in cluster.records)
    for instance in cluster.instances.values():
        instance.check_integrity()
        assert instance.num_sequences == 0
        assert instance.pool.used == 0
    assert cluster.handovers.links.num_in_flight() == 0
    assert len(cluster.router.state.ledger) == 0
    cluster.router.state.ledger.check_integrity()
    cluster.router.state.index.check_integrity()
