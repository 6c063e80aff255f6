"""The same cluster with its workers as Ray actors: the default."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from tests.support.cluster import Cluster, Place, is_listening, poll

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(400)]


def num_ready(cluster: Cluster, role: str) -> int:
    infos = [item["info"] for item in cluster.instances() if item["role"] == role]
    return sum(info is not None and info["state"] == "ready" for info in infos)


def test_cluster_on_ray_serves_recovers_and_leaves_nothing() -> None:
    place = Place()
    try:
        cluster = place.up()
        try:
            body = {"model": cluster.ready["model"], "prompt": "one two " * 40, "max_tokens": 4}
            url = f"{cluster.url}/v1/completions"
            assert httpx.post(url, json=body, trust_env=False, timeout=60).status_code == 200

            first = cluster.pid_of("decode")
            os.kill(first, signal.SIGKILL)

            def is_back() -> bool:
                decode = next(item for item in cluster.instances() if item["role"] == "decode")
                info = decode["info"]
                return bool(info and info["state"] == "ready" and info["epoch"] == 2)

            assert poll(is_back, 120)
            assert cluster.pid_of("decode") != first
            assert httpx.post(url, json=body, trust_env=False, timeout=60).status_code == 200

            # More instances than cores: an operator may, and a private Ray must not refuse.
            scaled = place.isthmus("scale", "decode", "3")
            assert scaled.returncode == 0, scaled.stderr
            assert poll(lambda: num_ready(cluster, "decode") == 3, 120)
            assert cluster.interrupt() == 0
            assert place.leftovers() == []
            assert not is_listening(cluster.port)
        finally:
            cluster.close()
    finally:
        place.close()
