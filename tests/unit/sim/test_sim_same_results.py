"""A change that is to make the simulator faster, or its code clearer, changes no result.

Whole runs, pinned to the nanosecond: what became of every request, what every instance did, and
every report that the router was told. The policy takes turns, so that no prediction of the router
is part of it, and the requests are made without a random generator or a transcendental function, so
that the figures are those of any machine. Who means to change what is simulated pins them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from hashlib import sha256

import pytest

from isthmus.common.cluster import LoadReport, Role
from isthmus.common.ids import InstanceId
from isthmus.sim.cluster import SimCluster
from isthmus.sim.flight import START_NS
from isthmus.sim.requests import SimRequest
from isthmus.sim.spec import Batching, InstanceSpec
from tests.support.sim_runs import MS, chain, make_cluster, make_request, make_spec

BLOCK = 16
NUM_REQUESTS = 160
ENGINES = {
    "times": "dcc66516",
    "counts": "7cf7db72",
    "instances": "c3a1b553",
    "reports": "bff42b42",
    "loads": "a60e734e",
    "caches": "42f6897e",
    "steps": "f123f9d9",
}
OFTEN = {
    "times": "e76802d8",
    "counts": "76d7a322",
    "instances": "86b35d64",
    "reports": "2a9b74fc",
    "loads": "df9a2e1f",
    "caches": "79cfe54c",
    "steps": "c955c4a1",
}
WHOLE = {
    "times": "74f58107",
    "counts": "63304ca1",
    "instances": "55fb7521",
    "reports": "d52a2b04",
    "loads": "aeb18ea2",
    "caches": "9a01bc39",
    "steps": "a138ec63",
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
    def at(when_ms: float) -> int:
        return START_NS + round(when_ms * MS)

    cluster.queue.at(at(700), cluster.kill, InstanceId("d0"))
    cluster.queue.at(at(2_500), cluster.start_again, InstanceId("d0"))
    cluster.queue.at(at(900), lambda _: cluster.slow_down(InstanceId("p0"), 2.5))
    cluster.queue.at(at(4_000), lambda _: cluster.slow_down(InstanceId("p0"), 1.0))
    cluster.queue.at(at(5_000), cluster.kill, InstanceId("p0"))


def digest(cluster: SimCluster, reports: list[LoadReport]) -> dict[str, str]:
    """Of each kind of result, so that a difference says where it is."""
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = {"policy": "round_robin", "min_remote_tokens": 64}
    cluster = make_cluster(*specs, router=router, **settings)
    told: list[LoadReport] = []
    tell = cluster.router.state.reported

    def listen(report: LoadReport) -> None:
        told.append(report)
        tell(report)

    monkeypatch.setattr(cluster.router.state, "reported", listen)
    cluster.offer(requests(seed=7))
    trouble(cluster)
    assert cluster.run()
    cluster.close()
    ends = {record.end for record in cluster.records}
    assert len(ends) > 1, "a run in which everything goes well pins little"
    assert digest(cluster, told) == pinned
