from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.cluster import Role
from isthmus.common.config import load_config
from isthmus.controlplane.placement import desired_replicas, plan_cpus, with_cpus


def plan(cores: int, **pools: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return plan_cpus(load_config(overrides=pools, environ={}), range(cores))


def test_default_pair_gets_a_core_each() -> None:
    assert sorted(plan(2).items()) == [("decode-0", (1,)), ("prefill-0", (0,))]


def test_one_instance_alone_is_not_pinned() -> None:
    sizes = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {"replicas": 1}}
    assert plan(2, **sizes) == {"mixed-0": ()}


def test_too_few_cores_pin_nobody() -> None:
    assert set(plan(1).values()) == {()}
    assert set(plan(2, decode={"replicas": 2}).values()) == {()}


def test_cores_of_a_pool_are_kept_from_the_others() -> None:
    made = plan(3, prefill={"cpus": [0]}, decode={"replicas": 2})
    assert made == {"prefill-0": (0,), "decode-0": (1,), "decode-1": (2,)}


def test_threads_of_an_engine_get_a_core_each() -> None:
    made = plan(4, prefill={"engine": {"num_threads": 3}})
    assert made == {"prefill-0": (0, 1, 2), "decode-0": (3,)}


def test_every_rank_gets_cores_of_its_own() -> None:
    alone = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}
    engine = {"tp_size": 2, "num_threads": 2}
    made = plan(4, **alone, mixed={"replicas": 1, "engine": engine})
    assert made == {"mixed-0": (0, 1, 2, 3)}
    assert plan(3, **alone, mixed={"replicas": 1, "engine": engine}) == {"mixed-0": ()}


@given(
    cores=st.integers(0, 16),
    replicas=st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)),
    threads=st.integers(1, 3),
)
def test_automatic_plan_never_shares_a_core(
    cores: int, replicas: tuple[int, int, int], threads: int
) -> None:
    pools = {
        role.value: {"replicas": count, "engine": {"num_threads": threads}}
        for role, count in zip(Role, replicas, strict=True)
    }
    made = plan(cores, **pools)
    pinned = [core for cpus in made.values() for core in cpus]
    assert len(made) == sum(replicas)
    assert len(set(pinned)) == len(pinned)
    assert set(pinned) <= set(range(cores))
    assert all(len(cpus) in (0, threads) for cpus in made.values())


def test_configuration_of_one_instance_changes_its_pool_only() -> None:
    config = load_config(environ={})
    changed = with_cpus(config, Role.DECODE, (3,))
    assert changed.decode.cpus == [3]
    assert changed.prefill == config.prefill
    assert desired_replicas(changed) == {Role.PREFILL: 1, Role.DECODE: 1, Role.MIXED: 0}
