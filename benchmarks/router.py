"""What deciding costs: ``python -m benchmarks.router``.

64 prefill and 64 decode instances, prompts of 2000 tokens (125 blocks), half of the instances
holding some prefix of them, an index filled with other blocks, and for each decision what comes
with it in a cluster that is busy: a first token, an end, and its share of load reports (ten a
second and instance at 3000 decisions a second). ``route`` is a decision alone, ``cycle`` all of
that.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from isthmus.common.clock import SystemClock
from isthmus.common.cluster import Role
from isthmus.common.config import LoggingConfig, RouterConfig
from isthmus.common.ids import BlockHash, DecisionId, InstanceId, RequestId
from isthmus.common.kv_events import BlocksStored, KvEventBatch
from isthmus.common.logging import configure_logging
from isthmus.common.types import Slo
from isthmus.router import Outcome, RouteQuery, Router
from isthmus.router.verdict import Admitted
from tests.support.router_cluster import make_info, make_query, make_report

NUM_TOKENS = 2_000
TARGETS = Slo("interactive", ttft_ms=20_000, tpot_ms=2_000)
REPORTS_PER_DECISION = 128 * 10 / 3_000
POLICIES = ("goodput", "least_predicted_load", "least_loaded", "power_of_two", "round_robin")


class Load:
    """A router in a busy cluster. ``decide``: one decision; ``follow``: what comes with it."""

    def __init__(self, num_per_role: int, policy: str, num_blocks: int, num_open: int) -> None:
        self.router = Router(
            RouterConfig(policy=policy, index_max_blocks=num_blocks + 1_000), SystemClock()
        )
        self.names: list[str] = []
        self.num_refused = 0
        self._num_open = num_open
        self._prefilling: deque[DecisionId] = deque()
        self._decoding: deque[DecisionId] = deque()
        self._seqs: dict[str, int] = {}
        self._reports = 0.0
        self._queries = self._make_queries()
        self._query = next(self._queries)
        self._fill(num_per_role, num_blocks)

    def decide(self) -> None:
        verdict = self.router.submit(self._query)
        if isinstance(verdict, Admitted):
            self._prefilling.append(verdict.decision.decision_id)
        else:
            self.num_refused += 1

    def follow(self) -> None:
        self._query = next(self._queries)
        if len(self._prefilling) > 4:
            decision_id = self._prefilling.popleft()
            self.router.report(decision_id, Outcome.first_token())
            self._decoding.append(decision_id)
        if len(self._decoding) > self._num_open:
            self.router.report(self._decoding.popleft(), Outcome.finished(20.0))
        self._reports += REPORTS_PER_DECISION
        while self._reports >= 1:
            self._reports -= 1
            self._report(random.choice(self.names))

    def _report(self, name: str) -> None:
        self._seqs[name] = self._seqs.get(name, 0) + 1
        report = make_report(
            name, self._seqs[name], num_blocks=100_000, free_blocks=90_000, running_seqs=100,
            running_context_tokens=100 * NUM_TOKENS if name.startswith("d") else 0,
        )  # fmt: skip
        self.router.state.reported(report)

    def _fill(self, num_per_role: int, num_blocks: int) -> None:
        hashes = make_query(NUM_TOKENS).hash_chains[0]
        share = num_blocks // (2 * num_per_role)
        for index in range(num_per_role):
            for prefix, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
                name = f"{prefix}{index}"
                self.names.append(name)
                info = make_info(name, role, num_blocks=100_000, max_num_seqs=4_096)
                self.router.state.registered(info)
                stored = [random.randbytes(16) for _ in range(share)]
                blocks = tuple(BlockHash(value) for value in stored)
                if index % 2 == 0:
                    blocks += hashes[: random.randrange(1, len(hashes))]
                events = (BlocksStored(blocks),)
                self.router.state.kv_events(KvEventBatch(InstanceId(name), 1, 0, events, True))
                self._report(name)

    def _make_queries(self) -> Iterator[RouteQuery]:
        base = make_query(NUM_TOKENS, slo=TARGETS)
        return (replace(base, request_id=RequestId(str(number))) for number in count(1))


def measure(
    action: Callable[[], object], num_calls: int, between: Callable[[], None]
) -> list[tuple[float, float]]:
    """(elapsed, CPU) microseconds of each call. On a busy machine only the second means much."""
    times = []
    for _ in range(num_calls):
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
        mean = sum(ordered) / len(ordered)
        columns.append(f"{label} mean {mean:5.0f} p50 {p50:5.0f} p99 {p99:5.0f} us")
    print(f"{name:40s} {'   '.join(columns)}")


def show_rate(name: str, load: Load, num_cycles: int) -> None:
    """Whole cycles, by the CPU time of the process."""
    start = time.process_time()
    for _ in range(num_cycles):
        load.decide()
        load.follow()
    spent = time.process_time() - start
    print(
        f"{name:40s} {num_cycles / spent:8.0f} decisions a second of CPU, "
        f"{load.num_refused} not at once"
    )


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=64, help="per role")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the index")
    parser.add_argument("--open", type=int, default=10_000, help="decisions that are decoding")
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    random.seed(0)
    show("yardstick: adding up 10 000 integers", measure(lambda: add_up(10_000), 200, lambda: None))
    configure_logging(LoggingConfig(level="warning"))
    for policy in args.policies.split(","):
        before = resident_mib()
        load = Load(args.instances, policy, args.blocks, args.open)
        grown = resident_mib() - before
        print(f"{policy}: {args.blocks} blocks in the index, {grown:.0f} MiB more at most")
        for _ in range(args.open + 500):
            load.decide()
            load.follow()
        label = f"route, {policy}, {args.instances}x{args.instances}"
        show(label, measure(load.decide, args.requests, load.follow))
        show_rate(f"cycle, {policy}", load, args.requests)
        hashes = make_query(NUM_TOKENS).hash_chains[0]
        index = load.router.state.index
        times = measure(lambda: index.match(hashes), args.requests, lambda: None)  # noqa: B023
        show(f"match, {len(hashes)} blocks, {2 * args.instances} instances", times)


if __name__ == "__main__":
    main()
