"""Followers as Ray actors, one to a bundle of the placement group that the leader's actor is in.

The leader's process owns them: Ray ends them when it is gone, should they not have noticed already.
They are never restarted by themselves, since an instance lives and dies as one.
"""

from __future__ import annotations

import os
import sys

import msgspec
import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from isthmus.common.errors import InternalError
from isthmus.worker.rank import run_rank
from isthmus.worker.rank_link import Invitation

_GONE_TIMEOUT_S = 3.0


class RankActor:
    """One follower; its process ends with it."""

    def run(self, invitation: bytes) -> None:
        """Never returns: the call ends in an error when the process is gone."""
        code = run_rank(msgspec.msgpack.decode(invitation, type=Invitation))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class RayLauncher:
    """Implements ``RankLauncher`` inside the leader's actor. Each actor sees its own device only,
    so every rank's has the number that the leader's has."""

    def __init__(self) -> None:
        self._actors: dict[int, ray.actor.ActorHandle] = {}
        self._runs: dict[int, ray.ObjectRef] = {}

    def launch(self, invitation: Invitation) -> None:
        group = get_current_placement_group()
        if group is None:
            raise InternalError("this instance has no placement group for ranks", stage="start")
        resources = dict(group.bundle_specs[invitation.rank])
        actor_class = ray.remote(RankActor).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=invitation.rank
            ),
        )
        actor = self._actors[invitation.rank] = actor_class.remote()
        self._runs[invitation.rank] = actor.run.remote(msgspec.msgpack.encode(invitation))

    def problem(self) -> str:
        ended, _ = ray.wait(list(self._runs.values()), timeout=0)
        return next((f"rank {rank} ended" for rank, run in self._runs.items() if run in ended), "")

    def close(self) -> None:
        runs = list(self._runs.values())
        if runs:
            ray.wait(runs, num_returns=len(runs), timeout=_GONE_TIMEOUT_S)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._runs.clear()
