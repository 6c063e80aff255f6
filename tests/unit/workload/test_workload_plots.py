"""Pictures of runs, live and simulated, where matplotlib is there to draw them."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.loadgen import Record, Status, Targets, summarise
from isthmus.loadgen.plots import plot_rates, plot_run
from isthmus.sim import plots as sim_plots
from isthmus.sim import run_scenario
from isthmus.sim.run import Probe
from isthmus.workload import Call
from tests.support.sim_runs import make_scenario

pytest.importorskip("matplotlib")
PNG = b"\x89PNG"
TARGETS = Targets(500.0, None)


def records() -> list[Record]:
    served = Record(Call(0, 0.0, 8, 2), first_s=0.1, last_s=0.2, num_tokens=2, status=Status.DONE)
    return [served, Record(Call(1, 1.0, 8, 2), status=Status.REJECTED)]


def test_a_live_run_and_its_rates_are_drawn(tmp_path: Path) -> None:
    plot_run(tmp_path / "run.png", records(), TARGETS)
    plot_rates(tmp_path / "rates.png", {"m": [summarise(records(), TARGETS)]}, 0.9)
    assert all(file.read_bytes().startswith(PNG) for file in tmp_path.iterdir())


def test_a_simulated_run_and_its_rates_are_drawn(tmp_path: Path) -> None:
    sim_plots.plot_run(tmp_path / "run.png", run_scenario(make_scenario()).records)
    sim_plots.plot_rates(tmp_path / "rates.png", {"goodput": [Probe(1.0, 0.9, 0.9, 10)]}, 0.9)
    assert all(file.read_bytes().startswith(PNG) for file in tmp_path.iterdir())
