"""Against theory: one server, fixed service times, Poisson arrivals (M/D/1)."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.common.cluster import Role
from isthmus.workload import Arrivals, arrival_times
from tests.support.sim_runs import MODEL, check_over, make_cluster, make_request, make_spec


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_waits_are_those_of_the_m_d_1_queue(load: float) -> None:
    """Pollaczek and Khinchine: mean wait = load · service / (2 · (1 − load))."""
    count, prompt = 3_000, 100
    service_ms = MODEL.prefill_ms(prompt)
    times = arrival_times(Arrivals(load / service_ms * 1e3), count, np.random.default_rng(7))
    cluster = make_cluster(
        make_spec("m0", Role.MIXED, max_num_seqs=256, max_num_batched_tokens=prompt),
        dispatch_ms=0.0, report_interval_ms=1e6,
        router={"policy": "round_robin", "reservation_ttl_ms": 10**9},
    )  # fmt: skip
    cluster.offer([make_request(i, at * 1e3, prompt, 1) for i, at in enumerate(times.tolist())])
    cluster.run()
    finished = [record.ttft_ms for record in cluster.records if record.ttft_ms is not None]
    assert len(finished) == count
    wait_ms = float(np.mean(finished)) - service_ms
    expected_ms = load * service_ms / (2 * (1 - load))
    assert wait_ms == pytest.approx(expected_ms, rel=0.15)
    check_over(cluster)
