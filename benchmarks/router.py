"""What deciding costs: ``python -m benchmarks.router``.

As many prefill as decode instances, prompts of 2000 tokens (125 blocks), half of the instances
holding some prefix of them, an index filled with other blocks, and for each decision what comes
with it in a cluster that is busy: a first token, an end, its share of load reports (ten a second
and instance at 3000 decisions a second) and the KV events of its blocks, which both instances take
up, and of as many older ones, which both drop.

``route`` is a decision alone, from the question to the verdict, booking included; ``cycle`` a
decision with its outcomes and reports; ``with KV events`` all of it. Times are CPU time: on a
machine that is shared, elapsed time says little.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from resource import getpagesize

from isthmus.common import collection
from isthmus.common.clock import SystemClock
from isthmus.common.cluster import Role
from isthmus.common.config import LoggingConfig, RouterConfig
from isthmus.common.ids import BlockHash, DecisionId, InstanceId, RequestId
from isthmus.common.kv_events import BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from isthmus.common.logging import configure_logging
from isthmus.common.types import Slo
from isthmus.router import Outcome, RouteQuery, Router
from isthmus.router.native import CompiledBlocks
from isthmus.router.verdict import Admitted
from tests.support.router_cluster import make_info, make_query, make_report

NUM_TOKENS = 2_000
TARGETS = Slo("interactive", ttft_ms=20_000, tpot_ms=2_000)
DECISIONS_PER_S = 3_000
REPORTS_PER_S = 10  # of an instance
WARM_UP = 500
_IS_COMPILED = CompiledBlocks.create() is not None
POLICIES = ("goodput", "least_predicted_load", "least_loaded", "power_of_two", "round_robin")


class Load:
    """A router in a busy cluster. ``decide``: one decision; ``follow``: its outcomes and reports;
    ``store``: its KV events; ``prepare``: what is no part of any of them."""

    def __init__(self, num_per_role: int, policy: str, num_blocks: int, num_open: int) -> None:
        self.router = Router(
            RouterConfig(policy=policy, index_max_blocks=num_blocks + 100_000), SystemClock()
        )
        self.names: list[str] = []
        self.num_refused = 0
        self.index_bytes = 0
        self._num_open = num_open
        self._prefilling: deque[DecisionId] = deque()
        self._decoding: deque[DecisionId] = deque()
        self._seqs: dict[str, int] = {}
        self._reports = 0.0
        self._reports_per_decision = 2 * num_per_role * REPORTS_PER_S / DECISIONS_PER_S
        self._queries = self._make_queries()
        self._stored: dict[str, deque[tuple[BlockHash, ...]]] = {}
        self._batches: list[KvEventBatch] = []
        self._fill(num_per_role, num_blocks)
        self.prepare()

    def decide(self) -> None:
        verdict = self.router.submit(self._query)
        if isinstance(verdict, Admitted):
            self._prefilling.append(verdict.decision.decision_id)
        else:
            self.num_refused += 1

    def follow(self) -> None:
        if len(self._prefilling) > 4:
            decision_id = self._prefilling.popleft()
            self.router.report(decision_id, Outcome.first_token())
            self._decoding.append(decision_id)
        if len(self._decoding) > self._num_open:
            self.router.report(self._decoding.popleft(), Outcome.finished(20.0))
        self._reports += self._reports_per_decision
        while self._reports >= 1:
            self._reports -= 1
            self._report(random.choice(self.names))

    def store(self) -> None:
        for batch in self._batches:
            self.router.state.kv_events(batch)

    def prepare(self) -> None:
        """The next question, and KV events of two instances."""
        self._query = next(self._queries)
        names = random.choice(self.names[::2]), random.choice(self.names[1::2])
        blocks = _blocks(NUM_TOKENS // 16)
        self._batches = []
        for name in names:
            first = self.router.state.index.next_seq(InstanceId(name), 1)
            stored = self._stored.setdefault(name, deque())
            stored.append(blocks)
            events: tuple[KvEvent, ...] = (BlocksStored(blocks),)
            if len(stored) > 8:
                events = (BlocksRemoved(stored.popleft()), *events)
            self._batches.append(KvEventBatch(InstanceId(name), 1, first, events))

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
                blocks = _blocks(share)
                if index % 2 == 0:
                    blocks += hashes[: random.randrange(1, len(hashes))]
                events = (BlocksStored(blocks),)
                before = resident_bytes()
                self.router.state.kv_events(KvEventBatch(InstanceId(name), 1, 0, events, True))
                self.index_bytes += resident_bytes() - before
                if not _IS_COMPILED:  # then it keeps the hashes as they come
                    self.index_bytes += sum(map(_size, blocks))
                self._report(name)

    def _make_queries(self) -> Iterator[RouteQuery]:
        base = make_query(NUM_TOKENS, slo=TARGETS)
        return (replace(base, request_id=RequestId(str(number))) for number in count(1))


def _blocks(number: int) -> tuple[BlockHash, ...]:
    return tuple([BlockHash(random.randbytes(16)) for _ in range(number)])


def _size(block_hash: BlockHash) -> int:
    return block_hash.__sizeof__()


def measure(
    action: Callable[[], object], num_calls: int, between: Callable[[], None]
) -> list[float]:
    """CPU microseconds of each call."""
    times = []
    for _ in range(num_calls):
        between()
        start = time.thread_time_ns()
        action()
        times.append((time.thread_time_ns() - start) / 1_000)
    return times


def add_up(count: int) -> int:
    """Plain interpreter work, to compare machines (and neighbours) by."""
    total = 0
    for number in range(count):
        total += number
    return total


def show(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    mean = sum(ordered) / len(ordered)
    print(f"{name:44s} mean {mean:6.0f}  p50 {p50:6.0f}  p99 {p99:6.0f} us")


def show_cycle(name: str, load: Load, num_cycles: int) -> None:
    """Decisions with all that comes with them."""
    decided, followed, stored = [], [], []
    for _ in range(num_cycles):
        load.prepare()
        times = [time.thread_time_ns()]
        for action in (load.decide, load.follow, load.store):
            action()
            times.append(time.thread_time_ns())
        decided.append(times[1] - times[0])
        followed.append(times[2] - times[1])
        stored.append(times[3] - times[2])
    without = (sum(decided) + sum(followed)) / 1e9
    everything = without + sum(stored) / 1e9
    show(f"  outcomes and reports, {name}", [value / 1_000 for value in followed])
    show(f"  KV events, {name}", [value / 1_000 for value in stored])
    print(
        f"{'cycle, ' + name:44s} {num_cycles / without:6.0f} decisions a second of CPU, "
        f"{num_cycles / everything:.0f} with KV events; {load.num_refused} not at once"
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", default="64", help="per role; several with commas")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the index")
    parser.add_argument("--open", type=int, default=10_000, help="decisions that are decoding")
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    random.seed(0)
    configure_logging(LoggingConfig(level="warning"))
    collection.settle()  # as routers and gateways do
    show("yardstick: adding up 10 000 integers", measure(lambda: add_up(10_000), 200, lambda: None))
    for instances in map(int, args.instances.split(",")):
        for policy in args.policies.split(","):
            load = Load(instances, policy, args.blocks, args.open)
            name = f"{policy}, {instances}x{instances}"
            index = load.router.state.index
            size = load.index_bytes / max(1, len(index))
            print(f"{name}: {len(index)} blocks in the index, {size:.0f} bytes each")
            for _ in range(args.open + WARM_UP):
                load.decide()
                load.follow()
                load.store()
                load.prepare()

            def between(load: Load = load) -> None:
                load.follow()
                load.store()
                load.prepare()

            show(f"route, {name}", measure(load.decide, args.requests, between))
            show_cycle(name, load, args.requests)
            chains = make_query(NUM_TOKENS).hash_chains
            times = measure(lambda: index.holders(chains), args.requests, lambda: None)  # noqa: B023
            show(f"  match, {len(chains[0])} blocks", times)


if __name__ == "__main__":
    main()
