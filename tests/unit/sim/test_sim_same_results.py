"""A change that is to make the simulator faster, or its code clearer, changes no result.

Whole runs, pinned to the nanosecond: what became of every request, what every instance did, and
every report that the router was told. The policy takes turns, so that no prediction of the router
is part of it, and the requests are made without a random generator or a transcendental function, so
that the figures are those of any machine. Who means to change what is simulated pins them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from hashlib import sha256

import pytest

from isthmus.common.cluster import LoadReport, Role
from isthmus.common.ids import InstanceId
from isthmus.common.types import Slo
from isthmus.sim.cluster import SimCluster
from isthmus.sim.flight import START_NS
from isthmus.sim.requests import SimRequest
from isthmus.sim.spec import Batching, InstanceSpec
from tests.support.sim_runs import (
    MS,
    chain,
    listen_always,
    make_cluster,
    make_request,
    make_spec,
)

BLOCK = 16
NUM_REQUESTS = 160
ENGINES = {
    "times": "cd7843e8",
    "counts": "7cf7db72",
    "instances": "d0868e67",
    "reports": "866707f4",
    "loads": "fd08d7dc",
    "caches": "e366ee01",
    "steps": "4b728718",
}
OFTEN = {
    "times": "7d4b5b15",
    "counts": "76d7a322",
    "instances": "4ec47dda",
    "reports": "eaf04eee",
    "loads": "f06cb524",
    "caches": "64ddc99a",
    "steps": "295f7aad",
}
WHOLE = {
    "times": "b01a8a8c",
    "counts": "63304ca1",
    "instances": "b4e1a4cf",
    "reports": "02ae4f88",
    "loads": "c3522f74",
    "caches": "80efec9e",
    "steps": "c61024a2",
}


def draw(seed: int) -> Iterator[int]:
    """Numbers that look random (the multiplier of MINSTD; Park and Miller, CACM 1988)."""
    while True:
        seed = seed * 48_271 % 2_147_483_647
        yield seed


def requests(seed: int) -> Iterator[SimRequest]:
    """A crowd, then a trickle; a third of the prompts begin as others did, some clients leave."""
    numbers = draw(seed)
    at_ms = 0.0
    for index in range(NUM_REQUESTS):
        at_ms += next(numbers) % (40 if index < NUM_REQUESTS // 2 else 400)
        prompt = 1 + next(numbers) % 700
        shared = next(numbers) % 3
        leaves = next(numbers) % 10 == 0
        yield make_request(
            index,
            at_ms,
            prompt,
            output=1 + next(numbers) % 150,
            hashes=chain(prompt // BLOCK, first=1_000 * shared if shared else 10_000 * (index + 2)),
            cancel_ns=round((at_ms + next(numbers) % 3_000) * MS) if leaves else None,
        )


def engines() -> list[InstanceSpec]:
    """Too few blocks, so that some wait and some are preempted."""
    room = {"num_blocks": 120, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    wire = {"link_bytes_per_ms": 100_000.0}
    return [
        make_spec("p0", Role.PREFILL, **room, **wire),
        make_spec("p1", Role.PREFILL, **room, **wire, has_prefix_cache=False),
        make_spec("d0", Role.DECODE, **room, **wire),
        make_spec("d1", Role.DECODE, **room, **wire, block_size=BLOCK),
        make_spec("m0", Role.MIXED, **room, **wire),
    ]


def whole_prompts() -> list[InstanceSpec]:
    room = {"batching": Batching.PROMPTS_FIRST, "max_num_batched_tokens": 1_024}
    return [
        make_spec("p0", Role.PREFILL, **room),
        make_spec("d0", Role.DECODE, **room),
        make_spec("d1", Role.DECODE, **room),
    ]


def trouble(cluster: SimCluster) -> None:
    """Never when a report is due: which of the two is first is nobody's business."""

    def at(when_ms: float) -> int:
        return START_NS + round(when_ms * MS)

    cluster.queue.at(at(700.3), cluster.kill, InstanceId("d0"))
    cluster.queue.at(at(2_500.3), cluster.start_again, InstanceId("d0"))
    cluster.queue.at(at(900.3), lambda _: cluster.slow_down(InstanceId("p0"), 2.5))
    cluster.queue.at(at(4_000.3), lambda _: cluster.slow_down(InstanceId("p0"), 1.0))
    cluster.queue.at(at(5_000.3), cluster.kill, InstanceId("p0"))


def digest(cluster: SimCluster, reports: list[LoadReport]) -> dict[str, str]:
    """Of each kind of result, so that a difference says where it is."""
    reports = sorted(reports, key=lambda report: (report.at_ns, report.instance_id))
    found = {
        "times": [
            (r.request.index, r.end, r.routed_ns, r.first_ns, r.second_ns, r.end_ns)
            for r in cluster.records
        ],
        "counts": [
            (r.reason, r.num_tokens, r.num_cached, r.is_local, r.num_attempts)
            for r in cluster.records
        ],
        "instances": [
            (i.spec.instance_id, i.epoch, i.busy_ns, i.num_steps, i.num_preempted)
            for i in (*cluster.retired, *cluster.instances.values())
        ],
        "reports": [
            (r.instance_id, r.epoch, r.seq, r.at_ns, r.waiting_seqs, r.waiting_tokens)
            for r in reports
        ],
        "loads": [
            (r.oldest_wait_ms, r.running_seqs, r.running_context_tokens, r.free_blocks)
            for r in reports
        ],
        "caches": [(r.held_blocks, r.cached_blocks, r.step_ms, r.steps) for r in reports],
        "steps": [astuple(r.totals) for r in reports],
    }
    return {kind: sha256(repr(what).encode()).hexdigest()[:8] for kind, what in found.items()}


@pytest.mark.parametrize("is_eager", [True, False], ids=["every report", "as asked for"])
@pytest.mark.parametrize(
    ("specs", "settings", "pinned"),
    [
        pytest.param(engines(), {}, ENGINES, id="engines"),
        pytest.param(engines(), {"report_interval_ms": 7.0}, OFTEN, id="often reported"),
        pytest.param(whole_prompts(), {}, WHOLE, id="whole prompts"),
    ],
)
def test_a_run_ends_as_it_always_has(
    specs: list[InstanceSpec],
    settings: dict[str, float],
    pinned: dict[str, str],
    is_eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = {"policy": "round_robin", "min_remote_tokens": 64}
    cluster = make_cluster(*specs, router=router, **settings)
    told: list[LoadReport] = []
    tell = cluster.router.state.reported

    def listen(report: LoadReport, came_ns: int | None = None) -> None:
        assert came_ns == report.at_ns
        told.append(report)
        tell(report, came_ns)

    monkeypatch.setattr(cluster.router.state, "reported", listen)
    if is_eager:
        listen_always(cluster)
    cluster.offer(requests(seed=7))
    trouble(cluster)
    assert cluster.run()
    cluster.close()
    ends = {record.end for record in cluster.records}
    assert len(ends) > 1, "a run in which everything goes well pins little"
    found = digest(cluster, told)
    if not is_eager:  # of reports that nobody asks for some are not made
        of_reports = found.keys() & {"reports", "loads", "caches", "steps"}
        assert len(told) < cluster.feed.num_reports
        found |= {kind: pinned[kind] for kind in of_reports}
    assert found == pinned


@pytest.mark.parametrize("policy", ["goodput", "least_predicted_load"])
def test_whoever_asks_for_every_report_decides_the_same(policy: str) -> None:
    """Reports are made when the router decides something, and it decides as if it had had all."""
    found: list[dict[str, str]] = []
    for is_eager in (True, False):
        cluster = make_cluster(*engines(), router={"policy": policy, "min_remote_tokens": 64})
        if is_eager:
            listen_always(cluster)
        slo = Slo("default", ttft_ms=2_000.0, tpot_ms=40.0)
        cluster.offer(replace(request, slo=slo) for request in requests(seed=11))
        trouble(cluster)
        assert cluster.run()
        cluster.close()
        found.append(digest(cluster, []) | {"sent": str(cluster.feed.num_reports)})
    assert found[0] == found[1]
