"""`isthmus up` with instances of two ranks: seen in status, restarted whole, ended whole; and a
pair of unlike sizes serves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster, Place, poll
from tests.support.serving import write_serving_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROLES = ["--prefill", "0", "--decode", "0", "--mixed", "1", "--set", "mixed.engine.tp_size=2"]
PROMPT = {"prompt": "one two " * 40, "max_tokens": 4}


def info(cluster: Cluster) -> dict[str, Any]:
    """The instance's record; empty while it is not registered."""
    (instance,) = cluster.instances()
    return instance["info"] or {}


@pytest.mark.parametrize(
    "actuator",
    [
        pytest.param("ray", marks=pytest.mark.ray),
        # The same but for who starts the leader.
        pytest.param("process", marks=pytest.mark.slow),
    ],
)
def test_an_instance_of_two_ranks_serves_recovers_and_leaves_nothing(
    actuator: str, tmp_path: Path
) -> None:
    model = write_serving_model(tmp_path / "tiny")
    place = Place()
    try:
        cluster = place.up(*ROLES, "--model", str(model), "--actuator", actuator)
        try:
            body = {"model": cluster.ready["model"], **PROMPT}
            url = f"{cluster.url}/v1/completions"
            assert httpx.post(url, json=body, trust_env=False, timeout=60).status_code == 200
            before = info(cluster)
            pids = before["rank_pids"]
            text = place.isthmus("status").stdout
            assert f"mixed-0 has tp_size 2; pids of its ranks: {pids[0]}, {pids[1]}" in text

            os.kill(pids[1], signal.SIGKILL)

            def is_back() -> bool:
                now = info(cluster)
                return now.get("state") == "ready" and now["epoch"] == before["epoch"] + 1

            assert poll(is_back, 120)
            assert not set(info(cluster)["rank_pids"]) & set(pids)
            assert httpx.post(url, json=body, trust_env=False, timeout=60).status_code == 200
            assert cluster.interrupt() == 0
            assert place.leftovers() == []
        finally:
            cluster.close()
    finally:
        place.close()


def test_a_pair_of_unlike_sizes_serves(tmp_path: Path) -> None:
    model = write_serving_model(tmp_path / "tiny")
    place = Place()
    sizes = ["--set", "prefill.engine.tp_size=2", "--set", "decode.engine.tp_size=1"]
    remote = ["--set", "router.min_remote_tokens=0", "--actuator", "process"]
    try:
        cluster = place.up(
            "--prefill", "1", "--decode", "1", "--model", str(model), *sizes, *remote
        )
        try:
            body = {"model": cluster.ready["model"], **PROMPT}
            url = f"{cluster.url}/v1/completions"
            assert httpx.post(url, json=body, trust_env=False, timeout=60).status_code == 200
            infos = {item["role"]: item["info"] for item in cluster.instances()}
            assert len(infos["prefill"]["rank_pids"]) == 2
            assert received_bytes(infos["decode"]["metrics_address"]) > 0
            assert cluster.interrupt() == 0
            assert place.leftovers() == []
        finally:
            cluster.close()
    finally:
        place.close()


def received_bytes(address: str) -> float:
    text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=20).text
    name = "isthmus_kv_transfer_bytes_total"
    lines = [line for line in text.splitlines() if line.startswith(name) and "receive" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
