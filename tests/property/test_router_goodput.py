"""The goodput policy's columns against its meaning, one instance and one pair at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.common.clock import NS_PER_MS
from isthmus.common.cluster import LatencyModel, LinkRate, Role
from isthmus.common.ids import DecisionId, InstanceId
from isthmus.common.types import Slo
from isthmus.router import Admitted, Outcome, RouteQuery
from isthmus.router.forecast import NEVER, Ask, Press
from isthmus.router.goodput import GoodputPolicy
from isthmus.router.lengths import OutputLengths
from isthmus.router.native import Weigher
from isthmus.router.prices import Prices
from isthmus.router.quantiles import Residuals
from isthmus.router.sessions import LastServed
from isthmus.router.state import RouterState
from isthmus.router.table import ClusterTable, PairTable
from tests.support.goodput_reference import weigh_slowly
from tests.support.router_cluster import LATENCY, LAYOUT, Cluster, make_query

STALE_MS = 500.0
QUERY = make_query(800)
CHAIN = QUERY.hash_chains[0]
LARGE = replace(LATENCY, large_batch=3, large_base=15.0, large_seq=0.5, large_context=0.001)


class NeverCleared(set[InstanceId]):
    """What has changed, though the router's own table has been brought up to date meanwhile."""

    def clear(self) -> None:
        pass


class Scene:
    """A cluster with a past, drawn from one seed; none of it is longer than what fades."""

    def __init__(self, seed: int) -> None:
        self.random = rnd = random.Random(seed)
        self.cluster = Cluster(policy="goodput", ageing_ms=300)
        self.names: list[str] = []
        self.is_alike = rnd.random() < 0.5
        self.open: list[DecisionId] = []
        self.lengths = OutputLengths()
        for _ in range(rnd.choice([0, 5, 50])):
            self.lengths.observe("m", "", 100, rnd.randrange(1, 600))
        sizes = [(1, 1, 0), (0, 2, 0), (0, 0, 2), (4, 3, 0), (3, 3, 2), (9, 12, 1)]
        for prefix, count in zip("pdm", rnd.choice(sizes), strict=True):
            for index in range(count):
                self.join(f"{prefix}{index}")

    @property
    def state(self) -> RouterState:
        return self.cluster.router.state

    @property
    def now_ns(self) -> int:
        return self.cluster.clock.monotonic_ns()

    def join(self, name: str) -> None:
        rnd = self.random
        role = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]]
        model = LATENCY
        if not self.is_alike:
            token = rnd.choice([0.05, 0.1, 0.3])
            model = rnd.choice([LARGE, LatencyModel(3, token, 1e-6, 10, 0.5, 1e-4)])
        changes = {"latency": model, "node": rnd.choice(["", "a", "b"])}
        changes["fetch_min_tokens"] = rnd.choice([0, 64, 256])
        if not self.is_alike:
            changes |= {"num_blocks": rnd.choice([60, 1_000]), "max_num_seqs": rnd.choice([2, 16])}
            changes |= {"max_num_batched_tokens": rnd.choice([256, 512])}
            if rnd.random() < 0.2:
                changes["kv_layout"] = replace(LAYOUT, dtype="float16")
        self.cluster.join(name, role, **changes)
        self.names.append(name)

    def happen(self) -> None:
        """One random event of the past."""
        rnd, name = self.random, self.random.choice(self.names)
        self.cluster.clock.advance_ms(rnd.choice([0.0, 0.3, 5.0, 30.0]))
        match rnd.randrange(6):
            case 0 | 1:
                verdict = self.cluster.router.submit(self.query())
                if isinstance(verdict, Admitted):
                    self.open.append(verdict.decision.decision_id)
            case 2:
                self.cluster.report(
                    name,
                    num_blocks=1_000,
                    free_blocks=rnd.choice([950, 1_000]),
                    running_seqs=rnd.choice([0, 1, 4]),
                    waiting_seqs=rnd.choice([0, 2]),
                    running_context_tokens=rnd.choice([0, 3_000]),
                    waiting_tokens=rnd.choice([0, 700]),
                    step_ms=rnd.uniform(0, 20),
                    links=(LinkRate(InstanceId(rnd.choice(self.names)), rnd.uniform(1e6, 1e9)),),
                )
            case 3 if self.open:
                decision_id = self.open.pop(rnd.randrange(len(self.open)))
                self.cluster.router.report(decision_id, Outcome.first_token())
                if rnd.random() < 0.7:
                    self.cluster.router.report(decision_id, Outcome.finished(rnd.uniform(5, 50)))
            case 4:
                self.cluster.store(name, CHAIN[: rnd.randrange(len(CHAIN))])
            case _:
                self.cluster.router.tick()

    def fall_silent(self) -> None:
        """Time without news, and then some of some."""
        rnd = self.random
        self.cluster.clock.advance_ms(rnd.choice([0.0, 0.0, 1.5, 10.0]) * STALE_MS)
        for name in rnd.sample(self.names, rnd.randrange(len(self.names) + 1)):
            if rnd.random() < 0.5:
                self.cluster.report(name, waiting_seqs=rnd.choice([0, 2]), waiting_tokens=700)

    def query(self) -> RouteQuery:
        rnd = self.random
        number = f"r{rnd.getrandbits(60)}"
        num_tokens = rnd.choice([20, 200, 800])
        exclude = {InstanceId(rnd.choice(self.names))} if rnd.random() < 0.2 else set()
        return make_query(
            num_tokens,
            number,
            hash_chains=(CHAIN[: num_tokens // 16],),
            slo=Slo(ttft_ms=rnd.choice([None, 300, 5_000]), tpot_ms=rnd.choice([None, 25, 200])),
            max_output_tokens=rnd.choice([1, 64, 500]),
            exclude=frozenset(exclude),
            needs_whole_prompt=rnd.random() < 0.1,
        )

    def residuals(self) -> Residuals:
        found = Residuals()
        for _ in range(self.random.choice([0, 5, 60])):
            found.observe(self.random.uniform(0.5, 2.0), self.now_ns)
        return found

    def ask(self, query: RouteQuery) -> Ask:
        rnd = self.random
        ttft_ms = query.slo.ttft_ms
        return Ask(
            output_tokens=rnd.choice([1, 64, 500]),
            ttft_ms=ttft_ms,
            left_ms=NEVER if ttft_ms is None else ttft_ms - rnd.choice([0.0, 40.0]),
            tpot_ms=query.slo.tpot_ms,
            quantile=rnd.choice([0.5, 0.9, 0.99]),
            remote=self.residuals(),
            local=self.residuals(),
            tpot=self.residuals(),
            now_ns=self.now_ns,
            press=Press(rnd.choice([0.0, 700.0]), rnd.choice([0.0, 300.0])),
            spares_residents=rnd.random() < 0.8,
            last=self.last(),
            left_alone=InstanceId(rnd.choice(self.names)) if rnd.random() < 0.3 else None,
        )

    def last(self) -> LastServed | None:
        rnd = self.random
        if rnd.random() < 0.5:
            return None
        prefill, decode = rnd.sample(["gone", *self.names], 2)  # never the same one
        worth_ms = rnd.choice([5.0, 100.0])
        is_local = rnd.random() < 0.3
        return LastServed(None if is_local else InstanceId(prefill), InstanceId(decode), worth_ms)

    @classmethod
    def lived(cls, seed: int) -> Scene:
        """After something has happened, and some have said nothing for a while."""
        scene = cls(seed)
        for _ in range(scene.random.randrange(40)):
            scene.happen()
        scene.fall_silent()
        return scene

    def table(self) -> ClusterTable:
        made = ClusterTable(self.state.links, self.state.index.slot)
        made.refresh(self.state.cluster.views, (), self.state.ledger.pending, self.now_ns)
        return made


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_choice_is_that_of_looking_at_every_pair(seed: int) -> None:
    scene = Scene.lived(seed)
    table, rnd = scene.table(), scene.random
    min_remote = rnd.choice([0, 64])
    policy = GoodputPolicy(STALE_MS, min_remote, exploration=0.0, is_compiled=False)
    now_ms = scene.now_ns / NS_PER_MS
    for _ in range(4):
        query = scene.query()
        ask, index, chain = scene.ask(query), scene.state.index, query.hash_chains[0]
        holders, depths = index.holders((chain,)), index.match((chain,))
        prices = Prices(rnd.choice([1.0, 2.5]), rnd.choice([1.0, 3.0]))
        for pairs in table.of_model("m"):
            found = policy.weigh(pairs, query, holders, ask, prices, now_ms)
            wanted = weigh_slowly(pairs, query, depths, ask, prices, now_ms, min_remote, STALE_MS)
            assert found.work_ms == wanted.work_ms
            assert found.floor_quantile_ms == wanted.floor_quantile_ms
            assert found.ready_ms == wanted.ready_ms
            assert found.num_workers == wanted.num_workers
            assert found.least_ttft_ms == wanted.least_ttft_ms
            assert found.least_tpot_ms == wanted.least_tpot_ms
            assert bool(found.candidates) == (wanted.place is not None)
            assert bool(found.obstacle) == (wanted.place is None)
            if wanted.place is not None:
                first = found.candidates[0]
                row, column = wanted.place
                views = pairs.prefills.views if row >= 0 else pairs.local.views
                assert first.decode.view is pairs.decodes.views[column]
                assert first.prefill.view is views[row if row >= 0 else column]
                assert first.is_local == (row < 0)
                assert first.score == wanted.score
                assert first.prefill.ttft_ms == wanted.ttft_ms
                assert first.decode.tpot_ms == wanted.tpot_ms


@pytest.mark.skipif(Weigher.create(0, 0.0) is None, reason="needs a C++ compiler")
@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_the_compiled_policy_says_what_numpy_says_to_the_last_bit(seed: int) -> None:
    scene = Scene.lived(seed)
    table, rnd = scene.table(), scene.random
    min_remote = rnd.choice([0, 64])
    exploration = rnd.choice([0.0, 0.5])
    plain, compiled = [
        GoodputPolicy(STALE_MS, min_remote, exploration, is_compiled=is_compiled)
        for is_compiled in (False, True)
    ]
    now_ms = scene.now_ns / NS_PER_MS
    for _ in range(6):
        query = scene.query()
        ask, holders = scene.ask(query), scene.state.index.holders(query.hash_chains)
        prices = Prices(rnd.choice([1.0, 2.5]), rnd.choice([1.0, 3.0]))
        for pairs in table.of_model("m"):
            asked = (pairs, query, holders, ask, prices, now_ms)
            found, wanted = compiled.weigh(*asked), plain.weigh(*asked)
            assert list(found.candidates) == list(wanted.candidates)
            assert replace(found, candidates=wanted.candidates) == wanted


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_brought_up_to_date_are_those_made_anew(seed: int) -> None:
    scene = Scene(seed)
    kept = scene.table()
    dirty = scene.state.dirty = scene.state.ledger.changed = NeverCleared()
    for _ in range(scene.random.randrange(1, 30)):
        scene.happen()
    kept.refresh(scene.state.cluster.views, dirty, scene.state.ledger.pending, scene.now_ns)
    for mine, anew in zip(kept.of_model("m"), scene.table().of_model("m"), strict=True):
        assert_alike(mine, anew)


def assert_alike(mine: PairTable, anew: PairTable) -> None:
    for one, other in ((mine.prompts, anew.prompts), (mine.decodes, anew.decodes)):
        assert one.views == other.views
        np.testing.assert_array_equal(one.rows, other.rows)
    for one, other in ((mine.prefills, anew.prefills), (mine.local, anew.local)):
        assert one.num_usable == other.num_usable == np.count_nonzero(one.barred == 0.0)
        assert one.has_strange == other.has_strange
    assert mine.decodes.prompted == anew.decodes.prompted
    assert (mine.rate, mine.quickest) == (anew.rate, anew.quickest)
    np.testing.assert_array_equal(mine.speed, anew.speed)
    np.testing.assert_array_equal(mine.rates, anew.rates)
