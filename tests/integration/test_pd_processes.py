"""A pair of real processes over the default connector: killed, stopped, drained, restarted."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from isthmus.common.cluster import InstanceInfo, InstanceState, Role
from isthmus.common.config import ClusterConfig
from isthmus.common.rpc import create_channel
from isthmus.protos.v1 import instance_pb2, instance_pb2_grpc
from isthmus.worker.threads import run_in_thread
from tests.support.engine_driver import make_prompt
from tests.support.gateway_stub import Answer, GatewayStub, wait_idle
from tests.support.tiny_models import save, tiny_model
from tests.support.worker_pair import WorkerPair
from tests.support.worker_process import WorkerCluster, WorkerProcess

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.nixl,
    pytest.mark.fault,
    pytest.mark.timeout(180),
]

Pair = WorkerPair[WorkerCluster, WorkerProcess]
LONG_PROMPT = make_prompt(1_500)  # many chunks of sixteen tokens: time enough to be killed in


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", vocab_size=96, max_position_embeddings=2048)
    return save(model, tmp_path_factory.mktemp("model"))


def make_config(model_path: Path) -> ClusterConfig:
    engine = {"num_blocks": 300, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    return ClusterConfig.model_validate(
        {
            "name": "pd",
            "model": {"path": str(model_path), "dtype": "float32"},
            "prefill": {"engine": engine},
            "decode": {"engine": engine},
            "mixed": {"engine": engine},
            "transfer": {"deadline_ms": 20_000, "quarantine_ms": 300},
            "registry": {"lease_ms": 2_000},
        }
    )


@asynccontextmanager
async def start_pair(model_path: Path, folder: Path) -> AsyncIterator[Pair]:
    async with WorkerCluster(make_config(model_path), folder) as cluster:
        workers = await cluster.start((Role.PREFILL, "prefill-0"), (Role.DECODE, "decode-0"))
        assert workers[1].info is not None
        async with GatewayStub(workers[1].info) as stream:
            asked = {"max_tokens": 8, "timeout_ms": 60_000}
            yield WorkerPair(cluster, *workers, stream, LONG_PROMPT, asked)


async def wait_half_done(answer: Answer, prefill: InstanceInfo) -> None:
    """Until the prefill instance has begun with the prompt."""
    async with create_channel(prefill.address) as channel:
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        async for message in stub.WatchLoad(instance_pb2.WatchLoadRequest(interval_ms=10)):
            if message.report.running_seqs:
                break
    assert not answer.tokens


async def test_a_pair_serves_and_leaves_in_order(model_path: Path, tmp_path: Path) -> None:
    async with start_pair(model_path, tmp_path) as pair:
        for length in (1, 15, 16, 17, 33, 200):
            prompt = make_prompt(length, salt=length)
            answer = await pair.run(prompt)
            assert answer.finished is not None, answer.failed
            assert answer.finished.local_reason == "none"
            blocks = -(-length // 16)
            size = pair.block_bytes
            assert answer.finished.transferred_bytes == blocks * size
            assert answer.tokens == await pair.alone(prompt)
        await pair.wait_idle()
        await check_metrics(pair)
        pair.prefill.signal(signal.SIGTERM)
        pair.decode.signal(signal.SIGINT)
        assert await pair.prefill.wait() == 0
        assert await pair.decode.wait() == 0
        assert await pair.cluster.find("prefill-0") is None
        assert await pair.cluster.find("decode-0") is None


async def check_metrics(pair: Pair) -> None:
    def read(address: str) -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as reply:
            return str(reply.read().decode())

    for info, side in ((pair.prefill_info, "send"), (pair.decode_info, "receive")):
        text = await run_in_thread(lambda info=info: read(info.metrics_address))
        own = [line for line in text.splitlines() if line.startswith("isthmus_")]
        label = f'role="{info.role.value}"'
        assert own
        assert all(label in line for line in own), [line for line in own if label not in line]
        moved = [line for line in own if line.startswith("isthmus_kv_transfer_bytes_total")]
        assert any(f'side="{side}"' in line and not line.endswith(" 0.0") for line in moved), moved


async def test_a_killed_prefill_process_costs_only_latency(
    model_path: Path, tmp_path: Path
) -> None:
    async with start_pair(model_path, tmp_path) as pair:
        answer = await pair.submit()
        await wait_half_done(answer, pair.prefill_info)
        pair.prefill.signal(signal.SIGKILL)
        await answer.end(60)
        assert answer.failed is None
        assert answer.finished is not None
        assert answer.finished.local_reason == "prefill_failed"
        assert answer.tokens == await pair.alone()
        assert await pair.prefill.wait() == -signal.SIGKILL
        # The decode instance saw that nobody listens there any more: no need to wait for 20 s.
        await wait_idle(pair.decode_info, timeout_s=10)

        pair.prefill = pair.cluster.spawn(Role.PREFILL, "prefill-0")
        restarted = await pair.cluster.wait_ready(pair.prefill)
        assert restarted.epoch == 2
        again = await pair.run(make_prompt(100, salt=3))
        assert again.finished is not None
        assert again.finished.local_reason == "none"
        await wait_idle(restarted, pair.decode_info)


async def test_a_stopped_prefill_process_is_not_waited_for(
    model_path: Path, tmp_path: Path
) -> None:
    """It holds its sockets, so only silence tells. What it might still write is waited out."""
    async with start_pair(model_path, tmp_path) as pair:
        answer = await pair.submit()
        await wait_half_done(answer, pair.prefill_info)
        pair.prefill.signal(signal.SIGSTOP)
        await answer.end(60)
        assert answer.failed is None
        assert answer.finished is not None
        assert answer.finished.local_reason == "prefill_failed"
        assert answer.tokens == await pair.alone()
        pair.prefill.signal(signal.SIGCONT)
        # Awake again it ends the transfer and says so, or the deadline passes.
        await wait_idle(pair.decode_info, timeout_s=40)
        await pair.cluster.wait_state(pair.prefill, InstanceState.READY)
        again = await pair.run(make_prompt(100, salt=3))
        assert again.finished is not None
        assert again.finished.local_reason == "none"
        await pair.wait_idle()


async def test_a_drain_refuses_new_work_and_ends_the_old(model_path: Path, tmp_path: Path) -> None:
    async with start_pair(model_path, tmp_path) as pair:
        running = await pair.submit()
        await wait_half_done(running, pair.prefill_info)
        pair.decode.signal(signal.SIGTERM)
        await pair.cluster.wait_state(pair.decode, InstanceState.DRAINING)
        refused = await pair.run(make_prompt(20))
        assert refused.failed is not None
        assert refused.failed.error.code == "draining"
        assert refused.failed.error.retryable
        await running.end(60)
        assert running.finished is not None
        assert await pair.decode.wait() == 0


async def test_a_second_signal_ends_the_process_at_once(model_path: Path, tmp_path: Path) -> None:
    async with start_pair(model_path, tmp_path) as pair:
        running = await pair.submit()
        await wait_half_done(running, pair.prefill_info)
        pair.prefill.signal(signal.SIGTERM)
        await pair.cluster.wait_state(pair.prefill, InstanceState.DRAINING)
        pair.prefill.signal(signal.SIGTERM)
        assert await pair.prefill.wait(5) == 128 + signal.SIGTERM
        await running.end(60)
        assert running.tokens == await pair.alone()


async def test_a_worker_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    config = make_config(tmp_path / "nothing-here")
    async with WorkerCluster(config, tmp_path) as cluster:
        worker = cluster.spawn(Role.DECODE, "decode-0", fresh=True)
        assert await worker.wait(100) == 2
        lines = [line for line in worker.log_text().splitlines() if "cannot start" in line]
        assert len(lines) == 1
        assert "nothing-here" in lines[0]
        assert "Traceback" not in worker.log_text()
