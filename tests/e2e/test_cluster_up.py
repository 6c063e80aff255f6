"""What an operator and a client see of a default cluster, with the sample model."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.support.cluster import Cluster, Place, is_listening, marked_processes, poll

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

QUESTION = "Explain in one sentence why the sky is blue during the day and red in the evening. "
FIGURE = re.compile(r"^(\w+)\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One prefill and one decode instance; ended by `isthmus down`, and nothing may be left.

    The default policy weighs measured times and may be right to compute a prompt on the decode
    instance of a busy machine. This one sends every prompt that is long enough to the prefill pool.
    """
    place = Place()
    started = place.up("--actuator", "process", "--set", "router.policy=round_robin")
    try:
        yield started
        port = started.port
        done = place.isthmus("down", "-o", "json")
        assert done.returncode == 0, done.stderr
        assert started.wait() == 0
        assert place.leftovers() == []
        assert not is_listening(port)
    finally:
        started.close()
        place.close()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def metric(cluster: Cluster, name: str, **labels: str) -> float:
    """Sum over all processes of a metric's series with these labels."""
    addresses = [info["metrics_address"] for info in cluster.registered()]
    pages = [
        httpx.get(f"http://{address}/metrics", trust_env=False, timeout=60) for address in addresses
    ]
    pages.append(httpx.get(f"{cluster.url}/metrics", trust_env=False, timeout=60))
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(value)
        for page in pages
        for series, text, value in FIGURE.findall(page.text)
        if series == name and all(label in text for label in wanted)
    )


def test_official_client_chats(cluster: Cluster, client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    assert model == cluster.ready["model"]
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=12,
        temperature=0,
    )
    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0


def test_prompt_is_computed_in_one_process_and_decoded_in_another(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    def moved() -> float:
        return metric(cluster, "isthmus_kv_transfer_bytes_total", role="decode")

    before, local = moved(), metric(cluster, "isthmus_local_prefill_total")
    prompt = "A prompt that nobody has sent before. " * 12
    done = client.completions.create(
        model=cluster.ready["model"], prompt=prompt, max_tokens=4, temperature=0
    )
    assert done.usage is not None
    bytes_per_token = 23_040  # K and V of 30 layers, 3 heads of 64, in bf16
    blocks = -(-done.usage.prompt_tokens // 16)
    assert metric(cluster, "isthmus_local_prefill_total") == local
    assert moved() - before == blocks * 16 * bytes_per_token


def test_status_and_chat_commands(cluster: Cluster) -> None:
    status = cluster.status()
    assert status["gateway"] == {"is_alive": True, "is_ready": True}
    states = {info["instance_id"]: info["state"] for info in cluster.registered()}
    assert states == {"prefill-0": "ready", "decode-0": "ready"}
    assert cluster.place.isthmus("status").stdout.count("ready") >= 3
    script = "Say hello.\n/reset\n\nSay goodbye.\n/exit\nnever sent\n"
    done = cluster.place.isthmus("chat", "--max-tokens", "4", "--temperature", "0", text=script)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 2


def test_port_in_use_is_refused_before_anything_starts(cluster: Cluster, place: Place) -> None:
    done = place.isthmus("up", "--name", "second", "--port", str(cluster.port))
    assert done.returncode == 1
    assert f"port {cluster.port} on 127.0.0.1 is in use" in done.stderr
    assert place.leftovers() == []


@pytest.mark.fault
def test_killed_worker_comes_back_and_the_cluster_serves(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    def restarts() -> int:
        return sum(int(item["num_restarts"]) for item in cluster.instances())

    before = restarts()
    os.kill(cluster.pid_of("prefill"), signal.SIGKILL)
    assert (
        client.completions.create(
            model=cluster.ready["model"], prompt=QUESTION * 4, max_tokens=4, temperature=0
        )
        .choices[0]
        .text
    )

    def is_back() -> bool:
        states = [item["info"] and item["info"]["state"] for item in cluster.instances()]
        return states == ["ready", "ready"] and restarts() == before + 1

    assert poll(is_back, 120)


@pytest.mark.fault
def test_killed_gateway_comes_back_on_its_port(cluster: Cluster) -> None:
    (gateway,) = (item for item in marked_processes(cluster.place.mark) if "gateway.main" in item)
    os.kill(int(gateway.split()[0]), signal.SIGKILL)
    assert poll(lambda: "gateway ended (ended by SIGKILL)" in cluster.errors, 60)
    assert poll(lambda: cluster.status()["gateway"]["is_ready"], 60)


@pytest.mark.fault
def test_workers_do_not_outlive_a_killed_control_process(place: Place) -> None:
    started = place.up("--mixed", "1", "--actuator", "process")
    try:
        assert len(marked_processes(place.mark)) == 3  # control, gateway, worker
        started.process.kill()
        started.wait()
        assert poll(lambda: marked_processes(place.mark) == [], 30)
        assert "no cluster named" in place.isthmus("status").stderr
    finally:
        started.close()


def test_worker_that_cannot_load_the_model_ends_the_start(place: Place) -> None:
    model = place.folder / "odd"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["OddForCausalLM"]}')
    (model / "model.safetensors").write_bytes(b"")
    done = place.isthmus("up", "--model", str(model), "--port", "0", "--actuator", "process")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert place.leftovers() == []


def test_detached_cluster_is_stopped_by_down(place: Place) -> None:
    done = place.isthmus(
        "up", "--detach", "--mixed", "1", "--actuator", "process", "--port", "0", "-o", "json",
        "--kv-cache-gib", "0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"mixed-0"' in done.stdout
    message = place.isthmus("chat", "-m", "Hi", "--max-tokens", "2", "-o", "json")
    assert message.returncode == 0, message.stderr
    assert place.isthmus("down").returncode == 0
    assert place.leftovers() == []


def test_second_interrupt_ends_everything_at_once(place: Place) -> None:
    started = place.up("--mixed", "1", "--actuator", "process", "--set", "lifecycle.drain_ms=60000")
    try:
        os.kill(started.pid_of("mixed"), signal.SIGSTOP)  # a drain would last for a minute
        started.process.send_signal(signal.SIGINT)
        assert poll(lambda: "stopping" in started.errors, 60)
        assert started.interrupt() == 130
        assert place.leftovers() == []
    finally:
        started.close()
