"""How long a route decision takes, and a prefix lookup: ``python -m benchmarks.router``.

64 prefill and 64 decode instances, prompts of 2000 tokens (125 blocks), half of the instances
holding some prefix of them, reports coming in between.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from isthmus.common.clock import SystemClock
from isthmus.common.cluster import Role
from isthmus.common.config import LoggingConfig, RouterConfig
from isthmus.common.ids import InstanceId
from isthmus.common.kv_events import BlocksStored, KvEventBatch
from isthmus.common.logging import configure_logging
from isthmus.router import Outcome, RouteQuery, Router
from tests.support.router_cluster import make_info, make_query, make_report

NUM_TOKENS = 2_000


def build(num_per_role: int, policy: str) -> tuple[Router, list[str]]:
    router = Router(RouterConfig(policy=policy), SystemClock())
    names = []
    hashes = make_query(NUM_TOKENS).hash_chains[0]
    for index in range(num_per_role):
        for prefix, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            name = f"{prefix}{index}"
            names.append(name)
            router.state.registered(make_info(name, role, num_blocks=100_000, max_num_seqs=512))
            if index % 2 == 0:
                depth = random.randrange(1, len(hashes))
                stored = (BlocksStored(hashes[:depth]),)
                router.state.kv_events(KvEventBatch(InstanceId(name), 1, 0, stored, True))
    return router, names


def measure(
    action: Callable[[], object], count: int, between: Callable[[], None]
) -> list[tuple[float, float]]:
    """(elapsed, CPU) microseconds of each call. On a busy machine only the second means much."""
    times = []
    for _ in range(count):
        between()
        start, start_cpu = time.perf_counter_ns(), time.thread_time_ns()
        action()
        cpu = time.thread_time_ns() - start_cpu
        times.append(((time.perf_counter_ns() - start) / 1_000, cpu / 1_000))
    return times


def add_up(count: int) -> int:
    """Plain interpreter work, to compare machines (and neighbours) by."""
    total = 0
    for number in range(count):
        total += number
    return total


def show(name: str, times: list[tuple[float, float]]) -> None:
    columns = []
    for label, values in zip(("elapsed", "CPU"), zip(*times, strict=True), strict=True):
        ordered = sorted(values)
        p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
        columns.append(f"{label} p50 {p50:6.0f} us  p99 {p99:6.0f} us")
    print(f"{name:40s} {'   '.join(columns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=64, help="per role")
    parser.add_argument("--requests", type=int, default=2_000)
    args = parser.parse_args()
    random.seed(0)
    show("yardstick: adding up 10 000 integers", measure(lambda: add_up(10_000), 200, lambda: None))
    configure_logging(LoggingConfig(level="warning"))
    for policy in ("least_predicted_load", "least_loaded", "round_robin"):
        router, names = build(args.instances, policy)
        query: RouteQuery = make_query(NUM_TOKENS)
        seqs = dict.fromkeys(names, 0)
        decisions: list[str] = []

        def report_some(
            router: Router = router,
            names: list[str] = names,
            seqs: dict[str, int] = seqs,
            decisions: list[str] = decisions,
        ) -> None:
            for name in random.sample(names, min(2, len(names))):
                seqs[name] += 1
                report = make_report(
                    name, seqs[name], num_blocks=100_000, free_blocks=90_000, running_seqs=8
                )
                router.state.reported(report)
            if len(decisions) > 300:
                router.report(decisions.pop(0), Outcome.finished())

        def route(
            router: Router = router, query: RouteQuery = query, decisions: list[str] = decisions
        ) -> None:
            decisions.append(router.route(query).decision_id)

        label = f"route, {policy}, {args.instances}x{args.instances}"
        show(label, measure(route, args.requests, report_some))
    hashes = query.hash_chains[0]
    times = measure(lambda: router.state.index.match(hashes), args.requests, lambda: None)
    show(f"match, {len(hashes)} blocks, {2 * args.instances} instances", times)


if __name__ == "__main__":
    main()
