from __future__ import annotations

import pytest

from isthmus.common.clock import SystemClock
from isthmus.common.cluster import LatencyModel
from isthmus.worker.calibrate import calibrate, fit
from tests.support.tiny_model import TinyModel, make_tiny_core

SPEC = TinyModel().spec


def test_a_fit_finds_the_line_that_the_samples_lie_on() -> None:
    prefill = [(n, 5.0 + 0.5 * n) for n in (8, 32, 64)]
    decode = [(b, 20.0 + 1.5 * b) for b in (1, 2, 4, 8)]
    # A tiny share of attention, so that the line stays a line.
    model = fit(_with_weights(10**12), 1024.0, prefill, decode)
    assert model.prefill_ms(100) == pytest.approx(55.0, rel=1e-3)
    assert model.decode_step_ms(16, 0) == pytest.approx(44.0, rel=1e-3)
    assert model.prefill_pair > 0
    assert model.decode_context > 0


def test_noise_never_makes_a_cost_negative() -> None:
    for prefill in ([(8, 9.0), (64, 3.0)], [(8, 0.1), (64, 50.0)], [(16, 4.0)]):
        model = fit(_with_weights(10**6), 1024.0, prefill, [(1, 1.0)])
        costs = LatencyModel.__slots__
        assert all(getattr(model, name) >= 0 for name in costs), model
        assert model.prefill_ms(512) > model.prefill_ms(1) > 0


def test_one_size_alone_is_a_rate_for_prefill_and_a_base_for_decode() -> None:
    model = fit(_with_weights(10**12), 1.0, [(8, 80.0)], [(1, 20.0)])
    assert model.prefill_ms(16) == pytest.approx(160.0, rel=1e-3)
    assert model.decode_step_ms(16, 0) == pytest.approx(20.0, rel=1e-3)


def test_the_best_time_at_each_size_counts() -> None:
    noisy = [(8, 90.0), (8, 9.0), (64, 37.0), (64, 370.0)]
    model = fit(_with_weights(10**12), 1.0, noisy, [(1, 1.0), (4, 2.0)])
    assert model.prefill_ms(8) == pytest.approx(9.0, rel=1e-3)
    assert model.prefill_ms(64) == pytest.approx(37.0, rel=1e-3)


def test_a_calibration_leaves_no_trace_in_the_engine() -> None:
    core = make_tiny_core(clock=SystemClock())
    model = calibrate(core, 32, SystemClock(), budget_s=0.3)
    assert model.prefill_ms(32) > 0
    assert model.decode_step_ms(4, 100) > 0
    load = core.load()
    assert load.free_blocks == load.num_blocks
    assert core.cached_hashes() == []
    assert core.take_kv_events() == []
    core.check_integrity()


@pytest.mark.parametrize("num_blocks", [3, 5, 9])
def test_a_pool_that_holds_almost_nothing_can_be_calibrated(num_blocks: int) -> None:
    core = make_tiny_core(clock=SystemClock(), num_blocks=num_blocks)
    model = calibrate(core, 32, SystemClock(), budget_s=0.1)
    assert model.decode_step_ms(1, 0) > 0
    assert core.load().free_blocks == core.load().num_blocks


def _with_weights(weight_bytes: int):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(SPEC, weight_bytes=weight_bytes)
