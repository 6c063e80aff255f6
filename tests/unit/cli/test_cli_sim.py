from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.common.errors import ConfigError

RUN = CliRunner()
QUICK = ["--set", "workload.prompt='50-100'", "--set", "workload.answer='4-8'", "--requests", "20"]


def test_a_run_without_a_file_simulates_one_pair() -> None:
    result = RUN.invoke(app, ["sim", "run", *QUICK, "--rate", "2", "-o", "json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report["roles"]) == {"prefill", "decode"}
    assert report["total"]["num_offered"] == 20


def test_a_run_prints_a_table_and_saves_its_figures(tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    flags = ["--pool", "mixed=2x4", "--rate", "1", "--ttft-ms", "1000", "--save", str(saved)]
    result = RUN.invoke(app, ["sim", "run", *QUICK, *flags])
    assert result.exit_code == 0, result.output
    assert "mixed" in result.stdout
    assert "second token gap" in result.stdout
    report = json.loads(saved.read_text())
    assert (report["num_instances"], report["num_gpus"]) == (2, 8)


def test_a_run_tells_what_became_of_each_tenant() -> None:
    flags = ["--rate", "1", "--set", "tenants.search=1", "--set", "tenants.chat=2"]
    result = RUN.invoke(app, ["sim", "run", *QUICK, *flags])
    assert result.exit_code == 0, result.output
    assert "tenant" in result.stdout
    assert "chat" in result.stdout
    assert "coverage says little here" in result.stdout


def test_a_burst_is_told_from_what_can_be_kept_up() -> None:
    flags = ["--rate", "1000", "--ttft-ms", "5000"]
    assert "all calls came within" in RUN.invoke(app, ["sim", "run", *QUICK, *flags]).output
    flags = ["--rate", "0.5", "--ttft-ms", "5000"]
    assert "all calls came within" not in RUN.invoke(app, ["sim", "run", *QUICK, *flags]).output


def test_policies_are_compared_on_the_same_arrivals() -> None:
    names = ["--policy", "round_robin", "--policy", "least_loaded"]
    flags = ["--pool", "mixed=2", "--rate", "1", "-o", "json"]
    result = RUN.invoke(app, ["sim", "compare", *QUICK, *names, *flags])
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    assert list(reports) == ["round_robin", "least_loaded"]
    assert reports["round_robin"]["offered_rate"] == reports["least_loaded"]["offered_rate"]


def test_a_plan_names_the_best_and_the_next_best() -> None:
    flags = ["--gpus", "2", "--rate", "1", "--ttft-ms", "400", "--tpot-ms", "60"]
    result = RUN.invoke(app, ["plan", *QUICK, *flags, "--tolerance", "0.3"])
    assert result.exit_code == 0, result.output
    assert "best: " in result.stdout
    assert "of the best" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["sim", "run", "nowhere.yaml"],
        ["sim", "run", "--set", "pools.9.count=2"],
        ["sim", "run", "--pool", "mixed"],
        ["sim", "run", "--policy", "magic"],
        ["plan", "--set", "workload.colour=1"],
    ],
)
def test_a_mistake_is_a_configuration_error(arguments: list[str]) -> None:
    result = RUN.invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)


def test_a_plan_of_one_shape_says_that_it_compares_nothing() -> None:
    """A fault of an instance that mixed shapes do not have leaves one shape."""
    fault = "faults=[{kind: slow, instance: d0, at_s: 1, for_s: 1}]"
    flags = ["--gpus", "2", "--rate", "1", "--ttft-ms", "400", "--set", fault]
    result = RUN.invoke(app, ["plan", *QUICK, *flags, "--tolerance", "0.3"])
    assert result.exit_code == 0, result.output
    assert "nothing to compare it with" in result.stdout
