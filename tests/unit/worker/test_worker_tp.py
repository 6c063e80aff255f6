"""What ranks take of their pool, and how followers are started."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig, PoolConfig
from isthmus.common.errors import InternalError
from isthmus.common.ids import InstanceId
from isthmus.worker import rank_launcher
from isthmus.worker.pool import cpus_of
from isthmus.worker.rank_launcher import INVITATION_VARIABLE, ChildLauncher
from isthmus.worker.rank_link import Invitation, RankLink, connect
from isthmus.worker.ranks import Ranks
from isthmus.worker.role import WorkerArgs
from isthmus.worker.threads import run_in_thread
from tests.support.ipv6 import needs_ipv6


@pytest.mark.parametrize(
    ("cpus", "tp_size", "expected"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([4, 5, 6], 2, [[4], [5, 6]]),
        ([7], 2, [[7], [7]]),
        ([], 2, [[], []]),
        ([0, 1], 1, [[0, 1]]),
    ],
)
def test_ranks_share_the_cores_of_their_pool(
    cpus: list[int], tp_size: int, expected: list[list[int]]
) -> None:
    pool = PoolConfig.model_validate({"cpus": cpus, "engine": {"tp_size": tp_size}})
    assert [cpus_of(pool, rank) for rank in range(tp_size)] == expected


class FakeChild:
    def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
        self.command = command
        self.invitation = msgspec.json.decode(env[INVITATION_VARIABLE], type=Invitation)
        self.code: int | None = None
        self.is_killed = False

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None and timeout is not None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.code or 0

    def kill(self) -> None:
        self.is_killed = True


def test_children_get_their_invitation_and_device_and_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[FakeChild] = []

    def start(command: list[str], **options: Any) -> FakeChild:
        started.append(FakeChild(command, **options))
        return started[-1]

    monkeypatch.setattr(rank_launcher.subprocess, "Popen", start)
    launcher = ChildLauncher()
    for rank in (1, 2):
        launcher.launch(Invitation("127.0.0.1", 5, rank, "secret", "cuda:0"))
    assert [child.invitation.device for child in started] == ["cuda:1", "cuda:2"]
    assert started[0].command == [sys.executable, "-m", "isthmus.worker.rank"]
    assert "secret" not in " ".join(started[0].command)  # everyone may read a command line
    assert launcher.problem() == ""
    started[1].code = -9
    assert launcher.problem() == "rank 2 ended with -9"
    launcher.close()
    assert [child.is_killed for child in started] == [True, False]


def test_a_follower_that_cannot_be_started_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_launcher.sys, "executable", "/no/such/python")
    with pytest.raises(InternalError, match="cannot start rank 1: No such file"):
        ChildLauncher().launch(Invitation("127.0.0.1", 5, 1, "secret", "cpu"))


class Joining:
    """Implements ``RankLauncher``: its followers only connect."""

    def __init__(self) -> None:
        self.links: list[RankLink] = []

    def launch(self, invitation: Invitation) -> None:
        self.links.append(connect(invitation, 20))

    def problem(self) -> str:
        return ""

    def close(self) -> None:
        for link in self.links:
            link.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_followers_find_their_leader_at_the_host_of_the_configuration(host: str) -> None:
    config = ClusterConfig.model_validate({"host": host, "mixed": {"engine": {"tp_size": 3}}})
    launcher = Joining()
    ranks = Ranks(WorkerArgs(config, Role.MIXED, InstanceId("mixed-0"), ""), launcher)
    ranks.launch()
    assert len(launcher.links) == 2
    await run_in_thread(ranks.close)
