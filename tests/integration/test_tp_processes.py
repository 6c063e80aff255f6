"""An instance of several rank processes: one engine here, its followers elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from isthmus.common.clock import SystemClock
from isthmus.common.config import EngineConfig, ModelConfig
from isthmus.common.errors import ConfigError, InstanceLostError, InternalError
from isthmus.engine.core import EngineCore
from isthmus.worker.rank_launcher import device_of
from isthmus.worker.rank_link import FrameKind, Hello, Invitation, RankLink, connect
from isthmus.worker.threads import run_in_thread
from tests.support.engine_driver import Driver, generate, make_prompt, make_request
from tests.support.tiny_models import save, tiny_model
from tests.support.tp_ranks import ForkLauncher, float32_config, ranked_engine

# The first follower waits for the process that it is forked from to import torch.
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

ENGINE = {"block_size": 4, "num_blocks": 65, "max_num_batched_tokens": 16, "max_num_seqs": 8}
REQUESTS = [
    make_request("greedy", make_prompt(40), max_tokens=12),
    make_request("short", make_prompt(3, 1), max_tokens=12),
    make_request("seeded", make_prompt(21, 2), max_tokens=12, temperature=0.9, seed=5),
    make_request("nucleus", make_prompt(7, 3), max_tokens=12, temperature=1.3, top_p=0.8, seed=9),
]


def tokens_of_one_rank(model: ModelConfig) -> list[list[int]]:
    core = EngineCore.build(model, EngineConfig.model_validate(ENGINE), SystemClock())
    return [outcome.token_ids for outcome in generate(core, *REQUESTS)]


@pytest.mark.parametrize("tp_size", [2, 4])
async def test_ranks_give_the_tokens_of_one(tp_size: int, tmp_path: Path) -> None:
    """Four ranks of a model with two KV heads: each head is on two of them."""
    model = ModelConfig(path=str(save(tiny_model("llama"), tmp_path / "m")), dtype="bfloat16")
    expected = tokens_of_one_rank(model)
    async with ranked_engine(model, tmp_path, tp_size=tp_size, **ENGINE) as ranked:
        assert (
            ranked.core.spec.fingerprint
            == EngineCore.build(
                model, EngineConfig.model_validate(ENGINE), SystemClock()
            ).spec.fingerprint
        )
        assert [outcome.token_ids for outcome in generate(ranked.core, *REQUESTS)] == expected
        pids = [follower.pid for follower in ranked.launcher.followers]
        assert ranked.ranks.pids == (os.getpid(), *pids)
        layout = ranked.core.kv_layout
        assert (layout.tp_rank, layout.tp_size, layout.num_kv_heads) == (0, tp_size, 1)
    assert [follower.exitcode for follower in ranked.launcher.followers] == [0] * (tp_size - 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_a_lost_follower_ends_the_step_and_is_named(
    how: signal.Signals, tmp_path: Path
) -> None:
    """One that is stopped is noticed by the deadline of a step."""
    model = float32_config(save(tiny_model("llama"), tmp_path / "m"))
    async with ranked_engine(model, tmp_path, tp_size=2, tp_timeout_ms=500, **ENGINE) as ranked:
        follower = ranked.launcher.followers[0]
        ranked.core.add(REQUESTS[0])
        assert ranked.core.step() is not None
        assert follower.pid is not None
        os.kill(follower.pid, how)
        with pytest.raises(InstanceLostError, match=r"lost|gone"):
            Driver(ranked.core).run()
        if how is signal.SIGKILL:
            with pytest.raises(InstanceLostError, match=rf"rank 1 \(pid {follower.pid}\) ended"):
                await asyncio.wait_for(asyncio.shield(ranked.ranks.failed), 10)
        else:
            follower.kill()


async def test_a_leader_that_is_gone_ends_its_followers(tmp_path: Path) -> None:
    model = float32_config(save(tiny_model("llama"), tmp_path / "m"))
    async with ranked_engine(model, tmp_path, tp_size=2, **ENGINE) as ranked:
        for link in ranked.ranks._links.values():
            link.hang_up()  # as the end of the process does
        follower = ranked.launcher.followers[0]
        await run_in_thread(lambda: follower.join(10))
        assert follower.exitcode == 1


async def test_heads_that_cannot_be_dealt_end_the_start_with_the_reason(tmp_path: Path) -> None:
    model = float32_config(save(tiny_model("llama"), tmp_path / "m"))
    with pytest.raises(ConfigError, match=r"tp_size 3 does not work.*sizes that do: 1, 2, 4"):
        async with ranked_engine(model, tmp_path, tp_size=3, **ENGINE):
            pass


async def test_a_follower_that_cannot_start_ends_the_start(tmp_path: Path) -> None:
    class Broken(ForkLauncher):
        def launch(self, invitation: Invitation) -> None:
            super().launch(Invitation(invitation.host, 1, invitation.rank, "", invitation.device))

    model = float32_config(save(tiny_model("llama"), tmp_path / "m"))
    with pytest.raises(InstanceLostError, match=r"followers ended with \[1\]"):
        async with ranked_engine(model, tmp_path, launcher=Broken(tmp_path), tp_size=2, **ENGINE):
            pass


async def test_whoever_does_not_know_the_token_is_sent_away(tmp_path: Path) -> None:
    class WithStrangers(ForkLauncher):
        def launch(self, invitation: Invitation) -> None:
            self.strangers = [connect(invitation, 5) for _ in range(2)]
            self.strangers[0].send(FrameKind.STEP, b"?")
            self.strangers[1].send_message(Hello(invitation.rank, 1, "a guess"))
            super().launch(invitation)

    model = float32_config(save(tiny_model("llama"), tmp_path / "m"))
    launcher = WithStrangers(tmp_path)
    async with ranked_engine(model, tmp_path, launcher=launcher, tp_size=2, **ENGINE) as ranked:
        assert generate(ranked.core, REQUESTS[1])[0].finish_reason is not None
        for stranger in launcher.strangers:
            with pytest.raises(InstanceLostError):
                stranger.receive()
            stranger.close()


async def test_frames_keep_their_bounds() -> None:
    here, there = (RankLink(s) for s in _connected())
    here.send(FrameKind.STEP, b"x" * 100_000)
    here.send(FrameKind.STOP)
    assert there.receive() == (FrameKind.STEP, b"x" * 100_000)
    assert there.receive() == (FrameKind.STOP, b"")
    here.close()
    with pytest.raises(InstanceLostError, match="ended"):
        there.receive()
    there.close()


async def test_what_cannot_be_a_frame_is_refused() -> None:
    client, server = _connected()
    link = RankLink(server)
    client.sendall(b"s\xff\xff\xff\xff" + b"q\1\0\0\0" + b"m\1\0\0\0?")
    for _ in range(2):
        with pytest.raises(InternalError, match="no frame"):
            link.receive()
    with pytest.raises(InternalError, match="Hello was due"):
        link.receive_message(Hello)
    client.close()
    link.close()


async def test_each_rank_has_a_device_of_its_own() -> None:
    assert [device_of("cuda:2", rank) for rank in range(2)] == ["cuda:2", "cuda:3"]
    assert [device_of("cuda", rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert device_of("cpu", 1) == "cpu"


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]
