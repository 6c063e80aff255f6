from __future__ import annotations

import urllib.request

from isthmus.common.cluster import InstanceState, Role
from isthmus.common.ids import InstanceId
from isthmus.common.types import InstanceRef
from isthmus.engine.types import SequenceMode
from isthmus.worker.metrics import InstanceMetrics, MetricsServer
from tests.support.engine_driver import Driver, make_prompt, make_request
from tests.support.tiny_model import make_tiny_core


def scrape(server: MetricsServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_gauges_follow_the_pool_and_every_series_names_role_and_instance() -> None:
    core = make_tiny_core(num_blocks=33)
    me = InstanceRef(InstanceId("metrics-p"), 2, "")
    metrics = InstanceMetrics(Role.PREFILL, me, core)
    metrics.bind_sessions(lambda: {"send:streaming": 3})
    metrics.state_changed(InstanceState.READY)
    core.add(make_request("a", make_prompt(20)), SequenceMode.PREFILL_ONLY)
    driver = Driver(core)
    while (output := core.step()) is not None:
        metrics.observe_step(output)
    driver.core.check_integrity()
    metrics.session_ended("send", "done", "local", 4096, 0.1)
    server = MetricsServer("127.0.0.1")
    try:
        series = scrape(server)
    finally:
        server.close()
    own = {name: value for name, value in series.items() if 'instance="metrics-p"' in name}

    def value(name: str, *labels: str) -> float:
        found = [v for n, v in own.items() if n.startswith(name) and all(x in n for x in labels)]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    assert value("isthmus_kv_blocks", 'state="held"') == 5
    assert value("isthmus_kv_blocks", 'state="free"') == 27
    assert value("isthmus_kv_blocks", 'state="used"') == 0
    assert value("isthmus_computed_prompt_tokens_total") == 20
    assert value("isthmus_kv_transfers_open", 'side="send"', 'state="streaming"') == 3
    assert value("isthmus_kv_transfer_bytes_total", 'side="send"') == 4096
    assert value("isthmus_instance_up", 'epoch="2"') == 1
    assert all('role="prefill"' in name for name in own)
    gateway = [name for name in series if name.startswith("isthmus_") and "instance=" not in name]
    assert gateway == []


def test_links_come_and_go_with_their_peers() -> None:
    me = InstanceRef(InstanceId("metrics-l"), 1, "")
    metrics = InstanceMetrics(Role.PREFILL, me, make_tiny_core(num_blocks=9))
    near, far = InstanceId("near"), InstanceId("far")
    server = MetricsServer("127.0.0.1")
    try:
        metrics.links_measured({near: 1e9, far: 2e6}, {near: "shm", far: "nixl"})
        metrics.links_measured({near: 3e9}, {near: "shm"})
        series = scrape(server)
    finally:
        server.close()
    links = {n: v for n, v in series.items() if "link_bytes" in n and "metrics-l" in n}
    assert list(links.values()) == [3e9]
    assert 'peer="near"' in next(iter(links))
