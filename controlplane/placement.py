"""Which process runs on which cores. Pure.

Two engines that share a core make each other's step times jump; one core each keeps them steady,
and the kernel moves the light processes (gateway, control plane) around them.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig, PoolConfig


def instance_name(role: Role, index: int) -> str:
    return f"{role.value}-{index}"


def desired_replicas(config: ClusterConfig) -> dict[Role, int]:
    return {role: config.pool(role).replicas for role in Role}


def plan_cpus(config: ClusterConfig, cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Cores of each instance by name; an empty tuple means "not pinned".

    A pool with ``cpus`` of its own has each of its instances pinned to just these. The others get
    disjoint cores, as many as their engine has threads on all ranks, when there are enough for all
    of them and there is more than one rank to keep apart.
    """
    wanted = [
        (instance_name(role, index), config.pool(role))
        for role, replicas in desired_replicas(config).items()
        for index in range(replicas)
    ]
    taken = {core for _, pool in wanted for core in pool.cpus}
    free = [core for core in cores if core not in taken]
    num_ranks = sum(pool.engine.tp_size for _, pool in wanted)
    is_roomy = num_ranks > 1 and len(free) >= sum(
        _num_threads(pool) for _, pool in wanted if not pool.cpus
    )
    plan: dict[str, tuple[int, ...]] = {}
    for name, pool in wanted:
        if pool.cpus:
            plan[name] = tuple(pool.cpus)
        elif is_roomy:
            plan[name] = tuple(free[: _num_threads(pool)])
            free = free[_num_threads(pool) :]
        else:
            plan[name] = ()
    return plan


def _num_threads(pool: PoolConfig) -> int:
    """Of all ranks of an instance."""
    return pool.engine.num_threads * pool.engine.tp_size


def with_cpus(config: ClusterConfig, role: Role, cpus: tuple[int, ...]) -> ClusterConfig:
    """The configuration of one instance that runs on ``cpus``."""
    pool = config.pool(role).model_copy(update={"cpus": list(cpus)})
    return config.model_copy(update={role.value: pool})
