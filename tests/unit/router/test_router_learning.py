"""What the router learns from outcomes and reports: bounded, and right in the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.clock import NS_PER_S
from isthmus.common.cluster import LatencyModel, Role, StepTotals
from isthmus.common.learned_latency import LearnedLatency
from isthmus.common.rls import RANGE as THETA_RANGE
from isthmus.common.rls import RecursiveFit
from isthmus.common.types import Slo
from isthmus.router.lengths import MAX_GROUPS, OutputLengths
from isthmus.router.links import FIRST_RATES, LinkClass, Links
from isthmus.router.prices import RANGE, PriceBook, Stage
from isthmus.router.quantiles import Kind, Promise, Residuals, ResidualTable, ratio_of, scaled
from isthmus.router.shares import MAX_TENANTS, TenantShares
from tests.support.router_cluster import make_info
from tests.support.router_world import World

TRUE = (8.0, 0.4, 1e-5)
GUESS = (5.0, 1.0, 2e-5)


def sample(rng: random.Random, noise: float = 0.0) -> tuple[tuple[float, float, float], float]:
    tokens = float(rng.randrange(16, 2_048))
    features = (1.0, tokens, tokens * tokens / 2)
    exact = sum(c * x for c, x in zip(TRUE, features, strict=True))
    return features, exact * (1 + rng.gauss(0, noise))


def test_fit_converges_from_a_guess_that_is_off_by_more_than_two() -> None:
    rng, fit = random.Random(1), RecursiveFit.of(GUESS)
    for _ in range(300):
        fit.observe(*sample(rng, 0.02))
    for _ in range(20):
        features, measured = sample(rng)
        assert fit.predict(features) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_change_of_speed_is_known_soon_whatever_does_not_vary(factor: float) -> None:
    """Steps of few short sequences are nearly all the same, and tell nothing of long ones."""
    rng, fit = random.Random(5), RecursiveFit.of((45.0, 3.0, 0.003))

    def step(speed: float) -> None:
        seqs = rng.choice([1.0, 1.0, 2.0, 3.0])
        exact = 45 + 3 * seqs + 0.003 * 40 * seqs
        fit.observe((1.0, seqs, 40 * seqs), exact * speed * (1 + rng.gauss(0, 0.1)))

    for _ in range(400):
        step(1.0)
    assert fit.predict((1.0, 2.0, 80.0)) == pytest.approx(51.2, rel=0.05)
    for _ in range(40):
        step(factor)
    assert fit.predict((1.0, 2.0, 80.0)) == pytest.approx(51.2 * factor, rel=0.15)
    for _ in range(100):
        step(factor)
    assert fit.predict((1.0, 2.0, 80.0)) == pytest.approx(51.2 * factor, rel=0.05)


def test_outliers_hardly_move_a_fit() -> None:
    rng, fit = random.Random(2), RecursiveFit.of(GUESS)
    for _ in range(300):
        fit.observe(*sample(rng, 0.02))
    features, measured = sample(rng)
    fit.observe(features, 50 * measured)
    assert fit.predict(features) == pytest.approx(measured, rel=0.2)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e6), st.floats(0, 1e9), st.floats(allow_nan=True, allow_infinity=True)
        ),
        max_size=60,
    )
)
def test_fit_stays_bounded_whatever_it_is_told(rows: list[tuple[float, float, float]]) -> None:
    fit = RecursiveFit.of(GUESS)
    for tokens, pairs, measured in rows:
        fit.observe((1.0, tokens, pairs), measured)
    low, high = THETA_RANGE
    assert all(low <= value <= high for value in fit.theta)
    assert fit.predict((1.0, 100.0, 5_000.0)) >= 0


def test_steps_of_a_report_teach_prefill_and_decode_apart() -> None:
    boot = LatencyModel(5, 1.0, 0.0, 20, 1.0, 0.001)
    learned, totals = LearnedLatency(boot), StepTotals()
    rng = random.Random(3)
    for _ in range(200):
        seqs, context, tokens = rng.randrange(1, 40), rng.randrange(1_000, 40_000), 512
        totals = replace(
            totals,
            decode_steps=totals.decode_steps + 2,
            decode_seqs=totals.decode_seqs + 2 * seqs,
            decode_context=totals.decode_context + 2 * context,
            decode_ms=totals.decode_ms + 2 * (30 + 0.5 * seqs + 0.001 * context),
            prefill_steps=totals.prefill_steps + 1,
            prefill_tokens=totals.prefill_tokens + tokens,
            prefill_pairs=totals.prefill_pairs + tokens * tokens / 2,
            beside_seqs=totals.beside_seqs + seqs,
            beside_context=totals.beside_context + context,
            prefill_ms=totals.prefill_ms + 5 + 0.5 * tokens + 0.5 * seqs + 0.001 * context,
        )
        learned.observe(totals)
    assert learned.model.decode_step_ms(20, 20_000) == pytest.approx(60, rel=0.05)
    assert learned.model.prefill_ms(512) == pytest.approx(5 + 256, rel=0.1)
    before = learned.num_samples
    learned.observe(totals)
    learned.observe(StepTotals())  # an epoch that began anew
    assert learned.num_samples == before


def test_what_the_boot_fit_lost_in_noise_is_learned_all_the_same() -> None:
    boot = LatencyModel(1e-4, 1.0, 0.0, 30, 1e-4, 0.001)
    learned, totals, rng = LearnedLatency(boot), StepTotals(), random.Random(4)
    for _ in range(200):
        seqs, tokens = rng.randrange(1, 9), rng.randrange(16, 200)
        totals = replace(
            totals,
            decode_steps=totals.decode_steps + 1,
            decode_seqs=totals.decode_seqs + seqs,
            decode_ms=totals.decode_ms + 25 + 2.5 * seqs,
            prefill_steps=totals.prefill_steps + 1,
            prefill_tokens=totals.prefill_tokens + tokens,
            prefill_ms=totals.prefill_ms + 15 + 1.2 * tokens,
        )
        learned.observe(totals)
    assert learned.model.decode_step_ms(1, 0) == pytest.approx(27.5, rel=0.05)
    assert learned.model.decode_step_ms(8, 0) == pytest.approx(45, rel=0.05)
    assert learned.model.prefill_ms(16) == pytest.approx(15 + 19.2, rel=0.15)
    assert learned.model.prefill_ms(200) == pytest.approx(15 + 240, rel=0.05)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_coverage_is_near_the_quantile_after_two_hundred_measurements(quantile: float) -> None:
    rng, table = random.Random(4), ResidualTable()
    hits = []
    for _ in range(400):
        predicted = rng.uniform(20, 800)
        promised = scaled(predicted, table.ratio(Kind.TTFT, 1, quantile, 0))
        measured = predicted * rng.lognormvariate(0.1, 0.3)
        table.observe(Promise(Kind.TTFT, 1, quantile, predicted, promised), measured, 0)
        hits.append(measured <= promised)
    late = hits[200:]
    assert sum(late) / len(late) == pytest.approx(quantile, abs=0.05)
    coverage, count = table.coverage(Kind.TTFT, quantile)
    assert count == 200
    assert coverage == sum(late) / 200


def test_coverage_returns_after_everything_has_become_twice_as_slow() -> None:
    rng, table = random.Random(5), ResidualTable()
    hits = []
    for number in range(800):
        predicted = rng.uniform(100, 800)
        promised = scaled(predicted, table.ratio(Kind.TPOT, 0, 0.9, 0))
        slowness = 1.0 if number < 300 else 2.0
        measured = predicted * slowness * rng.lognormvariate(0, 0.2)
        table.observe(Promise(Kind.TPOT, 0, 0.9, predicted, promised), measured, 0)
        hits.append(measured <= promised)
    late = hits[500:]
    assert sum(late) / len(late) == pytest.approx(0.9, abs=0.05)


def test_what_a_model_promised_that_is_another_one_now_is_judged_by_what_it_says_now() -> None:
    table = ResidualTable()
    for _ in range(100):
        promised = scaled(100.0, table.ratio(Kind.TPOT, 0, 0.9, 0))
        table.observe(Promise(Kind.TPOT, 0, 0.9, 100.0, promised), 100.0, 0)
    before = table.ratio(Kind.TPOT, 0, 0.9, 0)
    promise = Promise(Kind.TPOT, 0, 0.9, 100.0, scaled(100.0, before))
    for _ in range(100):  # twice as slow by the time they ended, and known to be
        assert table.observe(promise, 200.0, 0, change=2.0) == 200.0
    assert table.kept(Kind.TPOT, 0.9) == (0.5, 200)
    assert table.coverage(Kind.TPOT, 0.9) == (1.0, 200)
    assert table.ratio(Kind.TPOT, 0, 0.9, 0) == pytest.approx(before, abs=0.05)
    for _ in range(100):  # the same, but the model has not noticed
        assert table.observe(promise, 200.0, 0, change=1.1) == 100.0
    assert table.kept(Kind.TPOT, 0.9) == (0.0, 200)
    assert table.coverage(Kind.TPOT, 0.9) == (0.5, 200)
    assert table.ratio(Kind.TPOT, 0, 0.9, 0) > 1.5


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0.1, 1e5)), max_size=300))
def test_residuals_stay_bounded_and_in_order(pairs: list[tuple[float, float]]) -> None:
    residuals = Residuals()
    for measured, predicted in pairs:
        residuals.observe(ratio_of(measured, predicted), 0)
    assert list(residuals.ordered) == sorted(ratio for ratio, _ in residuals.recent)
    assert len(residuals.ordered) <= 200
    assert residuals.ratio(0.5, 0) <= residuals.ratio(0.9, 0) <= residuals.ratio(0.99, 0) <= 4.0
    assert residuals.ratio(0.9, 10**12) == Residuals().ratio(0.9, 0)
    assert not residuals.ordered


def test_lengths_are_those_seen_of_the_class_and_never_beyond_the_limit() -> None:
    lengths = OutputLengths()
    assert lengths.expected("m", "chat", 100, 1_000) == 128
    assert lengths.expected("m", "chat", 100, 16) == 16
    for _ in range(50):
        lengths.observe("m", "chat", 100, 400)
        lengths.observe("m", "code", 100, 20)
    assert lengths.expected("m", "chat", 100, 1_000) == pytest.approx(400, rel=0.05)
    assert lengths.expected("m", "chat", 100, 300) == 300
    assert lengths.expected("m", "code", 90, 1_000) == pytest.approx(20, rel=0.05)
    assert lengths.expected("m", "code", 30_000, 1_000) == pytest.approx(20, rel=0.05)
    assert 20 < lengths.expected("m", "new", 100, 1_000) < 400
    for number in range(2 * MAX_GROUPS):
        lengths.observe(f"m{number}", "x", 1, 1)
    assert len(lengths) <= MAX_GROUPS


def test_pool_that_misses_its_targets_becomes_dear_and_cheap_again() -> None:
    book, now_ns = PriceBook(), 0
    for _ in range(60):
        for _ in range(10):
            book.count(Stage.PREFILL, 0.9, True, now_ns)
            book.count(Stage.DECODE, 0.9, False, now_ns)
        now_ns += NS_PER_S
        book.refresh(now_ns)
    assert book.current.prefill == RANGE[1]
    assert book.current.decode == RANGE[0]
    for _ in range(400):
        now_ns += NS_PER_S
        book.refresh(now_ns)
    assert book.current.prefill == pytest.approx(1.0, abs=0.05)


def test_links_are_known_by_their_class_until_they_have_been_measured() -> None:
    links = Links()
    near, far = make_info("p0", Role.PREFILL, node="a"), make_info("d0", Role.PREFILL, node="b")
    beside = make_info("d1", Role.PREFILL, node="a")
    assert links.rates([near], [far])[0, 0] == FIRST_RATES[LinkClass.ZONE]
    assert links.rates([near], [beside])[0, 0] == FIRST_RATES[LinkClass.NODE]
    before = links.version
    for _ in range(20):
        links.observe(near, far, 10**8, 10.0)
    assert links.rates([near], [far])[0, 0] == pytest.approx(1e7)
    assert links.version > before
    links.forget(near.instance_id)
    assert links.rates([near], [far])[0, 0] == pytest.approx(1e7)  # its class has learned too


def test_a_link_between_zones_is_slower_than_one_inside_until_it_is_measured() -> None:
    links = Links()
    here = replace(make_info("p0", Role.PREFILL, node="a"), zone="east")
    there = replace(make_info("d0", Role.DECODE, node="b"), zone="west")
    beside = replace(make_info("d1", Role.DECODE, node="c"), zone="east")
    assert links.rates([here], [there])[0, 0] == FIRST_RATES[LinkClass.FAR]
    assert links.rates([here], [beside])[0, 0] == FIRST_RATES[LinkClass.ZONE]
    for _ in range(20):
        links.observe(here, there, 10**8, 10.0)
    other = replace(make_info("d2", Role.DECODE, node="d"), zone="west")
    assert links.rates([here], [other])[0, 0] == pytest.approx(1e7)
    assert links.rates([here], [beside])[0, 0] == FIRST_RATES[LinkClass.ZONE]


def test_tenants_share_by_weight_and_a_flood_delays_itself() -> None:
    shares = TenantShares({"b": 2.0})
    flood = [shares.tag("a", 10) for _ in range(100)]
    late = [shares.tag("b", 10) for _ in range(10)]
    assert max(late) < flood[10]
    order = sorted([*((tag, "a") for tag in flood), *((tag, "b") for tag in late)])
    first = [tenant for _, tenant in order[:15]]
    assert first.count("b") == pytest.approx(10, abs=1)
    shares.served("a", 0.0, 1_000, 0)
    shares.served("b", 0.0, 10, 0)
    factors = shares.factors(["a", "b", "new"], 0)
    assert factors["a"] < 1.0 == factors["b"] == factors["new"]
    for number in range(2 * MAX_TENANTS):
        shares.tag(str(number), 1)
    assert len(shares) <= MAX_TENANTS


def test_prediction_covers_again_within_a_minute_of_a_worker_slowed_to_half() -> None:
    rng, world = random.Random(6), World(2, 2, exploration=0.0)
    slo = Slo("s", ttft_ms=10_000, tpot_ms=500)
    when_ms = 0.0
    while when_ms < 180_000:
        when_ms += rng.expovariate(1 / 400)
        world.offer(when_ms, rng.randrange(100, 500), rng.randrange(8, 24), slo)
    world.start_reports(200_000)

    def slow_down() -> None:
        world.instances["p0"].slowness = world.instances["d0"].slowness = 2.0

    world.at(60_000, slow_down)
    world.run(60_000)
    residuals = world.router.knowledge.residuals
    for kind in (Kind.TTFT, Kind.TPOT):
        coverage, count = residuals.coverage(kind, 0.9)
        assert count >= 100
        assert coverage >= 0.85
    world.run(120_000)
    learned = world.router.cluster.views["p0"].learned
    slowness = learned.model.prefill_ms(300) / learned.boot.prefill_ms(300)
    assert slowness == pytest.approx(2.0, rel=0.2)
    world.run()
    for kind in (Kind.TTFT, Kind.TPOT):
        assert residuals.coverage(kind, 0.9)[0] >= 0.85
    world.router.state.ledger.check_integrity()


def test_one_link_is_as_fast_as_it_is_in_the_table_of_all() -> None:
    links, places = Links(), [("a", "x"), ("a", "x"), ("b", "x"), ("c", "y")]
    infos = [
        make_info(f"i{number}", Role.MIXED, node=node, zone=zone)
        for number, (node, zone) in enumerate(places)
    ]
    links.reported(infos[0], infos[2], 3e3)
    links.observe(infos[1], infos[3], 10**6, 500.0)
    table = links.rates(infos, infos)
    singly = [[links.rate(source, target) for target in infos] for source in infos]
    assert table.tolist() == singly
    assert singly[0][2] == 3e3
    links.forget(infos[2].instance_id)
    assert links.rate(infos[0], infos[2]) == FIRST_RATES[LinkClass.ZONE]


def test_what_an_instance_reports_of_its_links_counts_at_once_and_goes_with_it() -> None:
    links = Links()
    near, far = make_info("p0", Role.PREFILL, node="a"), make_info("d0", Role.PREFILL, node="b")
    before = links.version
    links.reported(near, far, 5e5)
    assert links.rates([near], [far])[0, 0] == 5e5
    assert links.version == before + 1
    links.reported(near, far, 5.1e5)  # not worth making tables anew
    assert links.version == before + 1
    links.forget(far.instance_id)
    assert links.rates([near], [far])[0, 0] == FIRST_RATES[LinkClass.ZONE]


def test_prompts_kept_from_a_slow_prefill_instance_do_not_make_their_own_look_fast() -> None:
    """Local prompts are predicted to take no less than the prefill instance would; that they do
    take less is no news of the decode instance's speed."""
    world = World(1, 1, exploration=0.0, min_remote_tokens=150)
    world.instances["p0"].slowness = 3.0
    slo = Slo("s", ttft_ms=60_000, tpot_ms=2_000)
    for number in range(120):
        world.offer(1_500.0 * number, 300 if number % 2 else 140, 4, slo)
    world.start_reports(200_000)
    world.run()
    local = [job for job in world.jobs if job.decision is not None and job.decision.prefill is None]
    assert len(local) >= 50
    views = world.router.cluster.views
    slow = views["p0"].latency.prefill_ms(140) / views["d0"].latency.prefill_ms(140)
    assert slow > 2.0, "the prefill instance is known to be slow"
    assert views["d0"].prefill_factor == pytest.approx(1.0, abs=0.15)
