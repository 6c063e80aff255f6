"""From a scenario to what a run needs: specs of instances, requests, a cluster, its faults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np

from isthmus.common.clock import NS_PER_S
from isthmus.common.cluster import Role
from isthmus.common.errors import ConfigError
from isthmus.common.ids import InstanceId
from isthmus.common.profile import InstanceProfile, read_profile
from isthmus.sim.cluster import ClusterSettings, SimCluster
from isthmus.sim.flight import START_NS
from isthmus.sim.profiles import MODEL_SIZES, kv_tokens, read_distserve, read_splitwise
from isthmus.sim.requests import Clients, SimRequest, make_requests
from isthmus.sim.scenario import FaultPart, PoolPart, Scenario
from isthmus.sim.spec import Batching, InstanceSpec
from isthmus.sim.step_model import StepModel
from isthmus.workload import (
    Arrivals,
    Call,
    Conversations,
    Mix,
    Share,
    at_rate,
    converse,
    parse_lengths,
    read_trace,
    repeat,
    synthesise,
)

DEFAULT_BLOCKS = 4_096
DEFAULT_BLOCK_SIZE = 16
DEFAULT_TOKEN_BYTES = 4_096
DEFAULT_BATCHED_TOKENS = 2_048
DEFAULT_SEQS = 256
DEFAULT_MODEL_LEN = 131_072
LIVE_INTERVAL_MS = 100.0
MANY_INSTANCES = 64  # beyond which reports become rarer, so that their number stays the same
MAX_INTERVAL_MS = 1_000.0


def make_specs(scenario: Scenario) -> list[InstanceSpec]:
    """Named p0, p1, … d0, … m0, … over all pools of a role. Raises ConfigError."""
    numbers = {role: count() for role in Role}
    specs = []
    for pool in scenario.pools:
        model, believed = _models(pool)
        room = _room(pool)
        for _ in range(pool.count):
            name = InstanceId(f"{pool.role.value[0]}{next(numbers[pool.role])}")
            specs.append(
                InstanceSpec(
                    instance_id=name,
                    role=pool.role,
                    model=model,
                    num_gpus=pool.tp,
                    hardware=pool.profile.hardware,
                    num_blocks=room.num_blocks,
                    block_size=room.block_size,
                    max_num_batched_tokens=room.max_num_batched_tokens,
                    max_num_seqs=room.max_num_seqs,
                    max_model_len=room.max_model_len,
                    kv_token_bytes=room.kv_token_bytes,
                    link_bytes_per_ms=pool.link_gb_per_s * 1e6,
                    batching=pool.batching,
                    has_prefix_cache=pool.prefix_cache,
                    fetch_min_tokens=_fetch_min_tokens(pool),
                    believed=believed,
                )
            )
    return specs


def make_calls(scenario: Scenario) -> list[Call]:
    """Raises ConfigError."""
    part = scenario.workload
    calls = _made_up(scenario) if part.trace is None else _trace(part.trace, part.requests)
    if part.max_tokens:
        calls = [c for c in calls if c.num_prompt_tokens + c.num_output_tokens <= part.max_tokens]
        calls = [replace(call, index=index) for index, call in enumerate(calls)]
    if not calls:
        source = f"{part.trace}: " if part.trace is not None else ""
        raise ConfigError(f"{source}no calls are short enough", stage="workload")
    if part.trace is None:
        return calls
    calls = repeat(calls, part.copies)
    return at_rate(calls, part.rate) if part.rate else calls


def make_all_requests(scenario: Scenario, calls: list[Call]) -> list[SimRequest]:
    """Raises ConfigError."""
    clients = Clients(
        classes={name: (part.slo(name), part.share) for name, part in scenario.classes.items()},
        tenants=scenario.tenants,
        max_output=scenario.workload.max_output,
        cancel_share=scenario.cancel_share,
        patience_s=scenario.patience_s,
        seed=scenario.seed,
    )
    sizes = {_block_size(pool, _saved(pool)) for pool in scenario.pools}
    if len(sizes) > 1:
        raise ConfigError("pools of one scenario have one block_size", stage="scenario")
    return make_requests(calls, clients, sizes.pop())


def make_cluster(scenario: Scenario, requests: list[SimRequest]) -> SimCluster:
    """A cluster with its arrivals and faults planned. Raises ConfigError."""
    settings = ClusterSettings(
        router=scenario.router,
        report_interval_ms=report_interval_ms(scenario),
        dispatch_ms=scenario.dispatch_ms,
        delivery_ms=scenario.delivery_ms,
        transfer_setup_ms=scenario.transfer_setup_ms,
        noise=scenario.noise,
        tenant_weights=scenario.tenant_weights,
        seed=scenario.seed,
    )
    cluster = SimCluster(settings, make_specs(scenario))
    for fault in scenario.faults:
        _plan_fault(cluster, fault)
    cluster.offer(requests)
    return cluster


def report_interval_ms(scenario: Scenario) -> float:
    """As live up to 64 instances; then so that the cluster sends as many reports as those."""
    if scenario.report_interval_ms:
        return scenario.report_interval_ms
    crowd = max(1.0, scenario.num_instances / MANY_INSTANCES)
    return min(LIVE_INTERVAL_MS * crowd, MAX_INTERVAL_MS)


def _plan_fault(cluster: SimCluster, fault: FaultPart) -> None:
    name = InstanceId(fault.instance)
    if name not in cluster.instances:
        known = ", ".join(list(cluster.instances)[:8])
        raise ConfigError(f"faults: no instance '{name}' ({known}, …)", stage="scenario")
    begin_ns = START_NS + round(fault.at_s * NS_PER_S)
    end_ns = begin_ns + round(fault.for_s * NS_PER_S)
    if fault.kind == "kill":
        cluster.queue.at(begin_ns, cluster.kill, name)
        if fault.for_s:
            cluster.queue.at(end_ns, cluster.start_again, name)
        return
    cluster.queue.at(begin_ns, lambda _: cluster.slow_down(name, fault.factor))
    if fault.for_s:
        cluster.queue.at(end_ns, lambda _: cluster.slow_down(name, 1.0))


def _made_up(scenario: Scenario) -> list[Call]:
    part = scenario.workload
    prompt, answer = parse_lengths(part.prompt), parse_lengths(part.answer)
    arrivals = Arrivals(part.rate, part.cv)
    if part.turns == 1:
        mix = Mix((Share(1.0, prompt, answer),))
        return synthesise(mix, arrivals, part.requests, scenario.seed)
    talk = Conversations(part.turns, prompt, answer, part.think_s)
    return converse(talk, arrivals, part.requests, np.random.default_rng(scenario.seed))


@cache
def _trace(file: Path, limit: int) -> list[Call]:
    """Once for all policies that are compared."""
    return read_trace(file, limit)


def _models(pool: PoolPart) -> tuple[StepModel, StepModel | None]:
    model = step_model(pool)
    scale = pool.believed_scale
    return model, (model.scaled(scale) if scale != 1.0 else None)


def step_model(pool: PoolPart) -> StepModel:
    """Raises ConfigError."""
    profile = pool.profile
    if profile.kind == "coefficients":
        part = profile.coefficients
        model = StepModel.from_coefficients(**part.model_dump())
    elif (saved := _saved(pool)) is not None:
        model = StepModel.of(saved.latency)
    else:
        assert profile.file is not None
        if profile.kind == "distserve":
            faithful = pool.batching is Batching.PROMPTS_FIRST
            model = read_distserve(profile.file, profile.model, pool.tp, with_overheads=faithful)
        else:
            model = read_splitwise(profile.file, profile.model, profile.hardware, pool.tp)
    return model.scaled(profile.scale)


@dataclass(frozen=True, slots=True)
class _Room:
    """How much an instance holds and takes at once."""

    block_size: int
    num_blocks: int
    kv_token_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


def _room(pool: PoolPart) -> _Room:
    """What the pool says counts, then what its profile knows. Raises ConfigError."""
    saved = _saved(pool)
    size = MODEL_SIZES.get(pool.profile.model)
    block_size = _block_size(pool, saved)
    num_blocks, token_bytes = pool.num_blocks, pool.kv_token_bytes
    if saved is not None:
        num_blocks = num_blocks or saved.num_blocks * saved.block_size // block_size
        token_bytes = token_bytes or saved.kv_bytes_per_token
    elif size is not None:
        num_blocks = num_blocks or kv_tokens(pool.profile.model, pool.tp) // block_size
        token_bytes = token_bytes or size.kv_token_bytes
    return _Room(
        block_size=block_size,
        num_blocks=num_blocks or DEFAULT_BLOCKS,
        kv_token_bytes=token_bytes or DEFAULT_TOKEN_BYTES,
        max_num_batched_tokens=pool.max_num_batched_tokens
        or (saved.max_num_batched_tokens if saved is not None else DEFAULT_BATCHED_TOKENS),
        max_num_seqs=pool.max_num_seqs
        or (saved.max_num_seqs if saved is not None else DEFAULT_SEQS),
        max_model_len=pool.max_model_len
        or (saved.max_model_len if saved is not None else DEFAULT_MODEL_LEN),
    )


def _fetch_min_tokens(pool: PoolPart) -> int:
    """Who caches nothing has nowhere to put a prefix."""
    is_chunked = pool.batching is Batching.CHUNKED
    fetches = pool.role is Role.PREFILL and pool.prefix_cache and is_chunked
    return pool.fetch_min_tokens if fetches else 0


def _block_size(pool: PoolPart, saved: InstanceProfile | None) -> int:
    return pool.block_size or (saved.block_size if saved is not None else DEFAULT_BLOCK_SIZE)


def _saved(pool: PoolPart) -> InstanceProfile | None:
    """The profile of an instance that the pool names. Raises ConfigError."""
    profile = pool.profile
    if profile.kind != "isthmus":
        return None
    assert profile.file is not None
    return read_profile(profile.file)
