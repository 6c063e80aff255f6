"""The actor's class without Ray: what Ray would call, in this process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from isthmus.common.config import ClusterConfig
from isthmus.common.registry.embedded import RegistryServer
from isthmus.worker.lifecycle import ExitCode
from isthmus.worker.threads import run_in_thread

pytestmark = [pytest.mark.asyncio, pytest.mark.ray]


async def test_a_worker_that_cannot_be_configured_is_not_restarted(tmp_path: Path) -> None:
    ray_actor = pytest.importorskip("isthmus.worker.ray_actor")
    registry = RegistryServer()
    address = await registry.start("127.0.0.1", 0)
    config = ClusterConfig.model_validate({"model": {"path": str(tmp_path / "nothing")}})
    actor = ray_actor.WorkerActor(config.model_dump_json(), "decode", "decode-0", address)
    try:
        code = await asyncio.wait_for(run_in_thread(actor.run), 30)
        assert code == ExitCode.CONFIG
        health = actor.health()
        assert (health.pid, health.is_running, health.exit_code) == (os.getpid(), False, 2)
    finally:
        await registry.stop()
