"""A whole small cluster as its client sees it: worker processes, gateway process, HTTP.

The registry is in the test's process, everything else is a child, KV moves over the default
connector. Dead workers can be restarted as an actuator would. The model is tiny and random; what it
must answer is known from an engine of the test's own (``Oracle``).
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from isthmus.common.addresses import split_address
from isthmus.common.clock import SystemClock
from isthmus.common.cluster import InstanceInfo, Role
from isthmus.common.config import ClusterConfig, EngineConfig, ModelConfig
from isthmus.common.model_files import locate_model
from isthmus.common.registry.embedded import RegistryServer
from isthmus.engine.core import EngineCore
from isthmus.gateway.detokenizer import Detokenizer
from isthmus.gateway.tokenizer import load_tokenizer
from tests.support.engine_driver import Driver, make_request
from tests.support.gateway_stub import check_integrity, wait_idle
from tests.support.poll import poll_until
from tests.support.tiny_models import save, tiny_model
from tests.support.tiny_tokenizer import build_tiny_backend, write_tiny_model
from tests.support.worker_process import ChildProcess, WorkerCluster, WorkerProcess

MODEL = "tiny"
START_S = 200.0
REQUEST_S = 60.0
POLL_S = 0.02


def write_serving_model(folder: Path) -> Path:
    """A tiny Llama with a tokenizer that covers its vocabulary."""
    write_tiny_model(folder)
    vocab_size = build_tiny_backend().get_vocab_size()
    return save(tiny_model("llama", vocab_size=vocab_size, max_position_embeddings=2048), folder)


def serving_config(model: Path | str, **sections: dict[str, Any]) -> ClusterConfig:
    """Small chunks, short leases, and every prompt computed remotely when that is possible."""
    engine = {"num_blocks": 300, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    tree: dict[str, Any] = {
        "name": "serving",
        "model": {"path": str(model), "dtype": "float32", "served_name": MODEL},
        "prefill": {"engine": engine},
        "decode": {"engine": engine},
        "mixed": {"engine": engine},
        "transfer": {"quarantine_ms": 300},
        "router": {"policy": "round_robin", "min_remote_tokens": 0},
        "registry": {"lease_ms": 2_000},
        "gateway": {"port": 0},
        "logging": {"level": "debug"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return ClusterConfig.model_validate(tree)


class Oracle:
    """What an undisturbed engine answers, one request at a time."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(num_blocks=300, max_num_batched_tokens=512)
        path = ModelConfig(path=str(model), dtype="float32")
        self._core = EngineCore.build(path, config, SystemClock())
        self._driver = Driver(self._core)
        self._tokenizer = load_tokenizer(locate_model(str(model)))
        self._known: dict[str, list[int]] = {}

    def tokens(self, prompt: Sequence[int], **sampling: Any) -> list[int]:
        key = repr((prompt, sorted(sampling.items())))
        if key not in self._known:
            name = f"oracle-{len(self._known)}"
            self._core.add(make_request(name, tuple(prompt), **sampling))
            self._known[key] = self._driver.run()[name].token_ids
        return self._known[key]

    def text(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """What a client reads for these tokens, all at once."""
        return Detokenizer(self._tokenizer, prompt).push(tokens)

    def close(self) -> None:
        self._core.close()


class Answer:
    """One streamed completion, read by a task of its own."""

    def __init__(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.is_done = False
        """The stream's own end mark has come."""
        self.broken = ""
        """What cut the connection, when something did."""
        self.body = body
        self._client = client
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async with self._client.stream("POST", "/v1/completions", json=self.body) as response:
                self.status, self.headers = response.status_code, response.headers
                if response.status_code != 200:
                    self.error = json.loads(await response.aread())["error"]
                    return
                async for line in response.aiter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.broken = repr(error)

    def _take(self, line: str) -> None:
        assert not self.is_done or not line, f"behind the end: {line}"
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            self.error = event.get("error") or self.error
            for choice in event.get("choices", ()):
                self.token_ids += choice["token_ids"]
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"] or self.finish_reason

    async def until(self, num_tokens: int) -> None:
        """Returns when so many tokens have come; fails when the answer ends before that."""
        await poll_until(
            lambda: len(self.token_ids) >= num_tokens or self._task.done(), REQUEST_S, 0.001
        )
        assert len(self.token_ids) >= num_tokens, f"{self.status} {self.error} {self.broken}"

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    async def end(self, timeout_s: float = REQUEST_S) -> Answer:
        await asyncio.wait_for(asyncio.shield(self._task), timeout_s)
        return self

    async def leave(self) -> None:
        """The client goes away."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Serving:
    """Use ``serving``; every worker is named ``<role>-<number>``."""

    def __init__(self, cluster: WorkerCluster, oracle: Oracle | None) -> None:
        self.cluster = cluster
        self._oracle = oracle
        self.workers: dict[str, WorkerProcess] = {}
        self.num_restarts = 0
        self.url = f"http://127.0.0.1:{cluster.config.gateway.port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=REQUEST_S, trust_env=False)
        self._answers: list[Answer] = []
        self._gateway: ChildProcess | None = None

    # --- processes -------------------------------------------------------------------------------

    @property
    def gateway(self) -> ChildProcess:
        assert self._gateway is not None
        return self._gateway

    def info(self, instance_id: str) -> InstanceInfo:
        info = self.workers[instance_id].info
        assert info is not None
        return info

    async def start(self, *specs: tuple[Role, str]) -> None:
        self._gateway = self.cluster.spawn_gateway()
        for worker in await self.cluster.start(*specs):
            self.workers[worker.instance_id] = worker
        await self.wait_serving()

    async def start_gateway(self) -> None:
        self._gateway = self.cluster.spawn_gateway()
        await self.wait_serving()

    async def kill(self, instance_id: str) -> None:
        worker = self.workers[instance_id]
        worker.signal(signal.SIGKILL)
        await worker.wait()

    async def restart(self, instance_id: str) -> InstanceInfo:
        """As the actuator does with a worker that has died; returns when the gateway uses it."""
        old = self.workers[instance_id]
        worker = self.cluster.spawn(old.role, instance_id)
        info = await self.cluster.wait_ready(worker)
        self.workers[instance_id] = worker
        self.num_restarts += 1
        await self.wait_serving()
        return info

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """While inside, whatever worker dies is started again."""
        task = asyncio.create_task(self._supervise())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _supervise(self) -> None:
        while True:
            for instance_id, worker in list(self.workers.items()):
                if worker.exit_code is not None:
                    await self.restart(instance_id)
            await asyncio.sleep(POLL_S)

    async def wait_restarts(self, count: int) -> None:
        """Until the supervisor has brought so many workers back."""
        await poll_until(lambda: self.num_restarts >= count, START_S)

    async def wait_serving(self) -> None:
        """Until the gateway is ready and counts every living worker, and no dead one."""
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            try:
                ready = await self.http.get("/ready")
                if ready.status_code == 200 and await self._counts_all():
                    return
            except httpx.HTTPError:
                assert self.gateway.exit_code is None, self.gateway.log_text()
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"not serving: {ready.text}\n{self.gateway.log_text()}")

    async def _counts_all(self) -> bool:
        metrics = await self.metrics()
        alive = Counter(w.role for w in self.workers.values() if w.exit_code is None)
        return all(
            metrics.get("isthmus_instances", role=role.value, state="ready") == alive[role]
            for role in Role
        )

    # --- requests --------------------------------------------------------------------------------

    def body(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        return {
            "model": MODEL, "prompt": list(prompt), "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields,
        }  # fmt: skip

    def submit(self, prompt: Sequence[int], **fields: Any) -> Answer:
        """A streamed completion under way."""
        answer = Answer(self.http, self.body(prompt, stream=True, **fields))
        self._answers.append(answer)
        return answer

    async def ask(self, prompt: Sequence[int], **fields: Any) -> Answer:
        return await self.submit(prompt, **fields).end()

    @property
    def oracle(self) -> Oracle:
        assert self._oracle is not None, "this cluster has been given none"
        return self._oracle

    def expected(self, answer: Answer) -> list[int]:
        """What an undisturbed engine answers to the same request."""
        own = ("model", "prompt", "ignore_eos", "return_token_ids", "stream")
        sampling = {name: value for name, value in answer.body.items() if name not in own}
        return self.oracle.tokens(answer.body["prompt"], **sampling)

    def check(self, answer: Answer) -> None:
        """The client got all of the right answer, once, and was told that this was all."""
        expected = self.expected(answer)
        assert (answer.status, answer.error, answer.broken) == (200, None, "")
        assert answer.token_ids == expected
        assert (answer.finish_reason, answer.is_done) == ("length", True)
        assert answer.text == self.oracle.text(answer.body["prompt"], expected)

    async def busy(self, *instance_ids: str) -> str:
        """The one of these instances that has a request before its first token here."""
        ends = time.monotonic() + REQUEST_S
        while time.monotonic() < ends:
            for instance_id in instance_ids:
                reply = await check_integrity(self.info(instance_id))
                if reply.sessions_by_state:
                    return instance_id
            await asyncio.sleep(0)
        raise AssertionError("no transfer has begun")

    # --- what is left ----------------------------------------------------------------------------

    async def wait_at_rest(self, timeout_s: float = 60.0) -> None:
        """Nothing of any request is left in a living instance, and its pool is whole."""
        alive = [self.info(w.instance_id) for w in self.workers.values() if w.exit_code is None]
        await wait_idle(*alive, timeout_s=timeout_s)

    async def metrics(self, instance_id: str = "") -> Metrics:
        """Of the gateway, or of an instance."""
        base = f"http://{self.info(instance_id).metrics_address}" if instance_id else ""
        return Metrics((await self.http.get(f"{base}/metrics")).text)

    async def close(self) -> None:
        for answer in self._answers:
            await answer.leave()
        await self.http.aclose()


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def get(self, name: str, **labels: str) -> float:
        """The sum over all series of this name that have these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


class Moved:
    """How far the counters of the gateway, or of an instance, have moved since ``mark``."""

    def __init__(self, serving: Serving, instance_id: str, before: Metrics) -> None:
        self._serving = serving
        self._instance_id = instance_id
        self._before = before

    @classmethod
    async def mark(cls, serving: Serving, instance_id: str = "") -> Moved:
        return cls(serving, instance_id, await serving.metrics(instance_id))

    async def by(self, name: str, **labels: str) -> float:
        now = await self._serving.metrics(self._instance_id)
        return now.get(name, **labels) - self._before.get(name, **labels)


@asynccontextmanager
async def serving(
    model: Path | str, oracle: Oracle | None, folder: Path, *roles: Role, **sections: dict[str, Any]
) -> AsyncIterator[Serving]:
    """A cluster with one worker for each of ``roles``, ready and known to its gateway."""
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        cluster = WorkerCluster(serving_config(model, **sections), folder)
        await stack.enter_async_context(cluster)
        running = Serving(cluster, oracle)
        stack.push_async_callback(running.close)
        counts = dict.fromkeys(Role, 0)
        specs = []
        for role in roles:
            specs.append((role, f"{role.value}-{counts[role]}"))
            counts[role] += 1
        await running.start(*specs)
        yield running


async def restart_registry(cluster: WorkerCluster) -> None:
    """A new one at the old address that remembers nothing."""
    cluster.registry = RegistryServer()
    await cluster.registry.start(*split_address(cluster.registry_address))
