"""What of ``make gpu`` runs without a GPU: cases, tables, a tiny model through the same code."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.gpu.__main__ import (
    NO_CARD,
    TARGETS,
    main,
    measure_kernels,
    measure_model,
)
from benchmarks.gpu.cases import DECODE_TARGET, PREFILL_TARGET, SMALL, Case, all_cases
from benchmarks.gpu.limits import CardLimits, measure_limits
from benchmarks.gpu.models import LLAMA_1B, LLAMA_8B, TINY
from benchmarks.gpu.report import Check, Figure, Report, Target
from benchmarks.gpu.steps import StepPlanSizes, decode_name
from benchmarks.gpu.timing import Action, HostTimer
from isthmus.kernels import select
from tests.gpu.kernels_on_cuda import travelling

LIMITS = CardLimits(bytes_per_s=1e12, flops_per_s=1e14)


@dataclass
class FakeTimer:
    """Runs the work once and says what it was told to."""

    answers: list[float]

    def seconds(self, action: Action) -> float:
        action()
        return self.answers.pop(0)


def test_without_a_card_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    assert main() == NO_CARD
    said = capsys.readouterr()
    assert "needs an NVIDIA GPU" in said.err
    assert said.out == ""


def test_limits_are_rates_of_what_was_timed() -> None:
    limits = measure_limits(FakeTimer([2.0, 0.5]), "cpu", copy_bytes=1000, matrix_size=10)
    assert limits == CardLimits(bytes_per_s=1000.0, flops_per_s=4000.0)
    assert limits.seconds(3000, 4000) == 3.0
    assert limits.seconds(3000, 40_000) == 10.0


def test_sizes_of_the_models_are_those_of_llama() -> None:
    for shape, parameters in ((LLAMA_1B, 1.236e9), (LLAMA_8B, 8.03e9)):
        matrices = shape.linear_weights + shape.head_weights * (2 - shape.has_tied_embeddings)
        assert matrices == pytest.approx(parameters, rel=2e-3)
    assert LLAMA_8B.kv_elements * 2 == 131_072  # bytes a token in bf16


@torch.inference_mode()
def test_every_case_runs_small_and_beside_others() -> None:
    kernels = select("cpu", 1, "reference")
    made: list[Case] = []

    def noted(make_case: Callable[[], Case]) -> Callable[[], Case]:
        def make() -> Case:
            made.append(make_case())
            return made[-1]

        return make

    cases = [noted(make_case) for make_case in all_cases(kernels, SMALL, "cpu")]
    figures = measure_kernels(cases, HostTimer(), LIMITS)
    names = [figure.name for figure in figures]
    assert len(set(names)) == len(names) == len(made)
    assert {DECODE_TARGET, PREFILL_TARGET} <= set(names)
    assert all(figure.seconds > 0 and figure.limit_s > 0 for figure in figures)
    flex = [figure for figure in figures if "FlexAttention" in figure.others_s]
    assert all(figure.others_s["FlexAttention"] is None for figure in flex)
    assert all("GPU only" in figure.note for figure in flex)
    assert all(f.others_s["SDPA"] for f in figures if "SDPA" in f.others_s)


@torch.inference_mode()
def test_cases_compute_what_the_others_compute() -> None:
    """Where nothing random goes in but the case's own inputs."""
    kernels = select("cpu", 1, "reference")
    compared = 0
    for make_case in all_cases(kernels, SMALL, "cpu"):
        case = make_case()
        for name in {"torch", "cuBLAS"} & set(case.others):
            ours, theirs = case.ours(), case.others[name]()()
            first = ours[0] if isinstance(ours, tuple) else ours
            second = theirs[0] if isinstance(theirs, tuple) else theirs
            torch.testing.assert_close(first.float(), second.float(), rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared >= 10


def test_bytes_of_decode_attention_are_those_of_keys_and_values() -> None:
    kernels = select("cpu", 1, "reference")
    case = next(iter(all_cases(kernels, replace(SMALL, scale=1024), "cpu")))()
    keys_and_values = 2 * 1 * 4 * SMALL.num_kv_heads * SMALL.head_dim * 4
    queries_and_result = 2 * SMALL.num_heads * SMALL.head_dim * 4
    assert case.num_bytes == keys_and_values + queries_and_result
    assert case.flops == 4 * 4 * SMALL.num_heads * SMALL.head_dim


def test_whole_steps_of_a_tiny_model_go_through_the_device_code() -> None:
    sizes = StepPlanSizes(decode=((1, 20), (3, 9)), prefill=(8, 17), num_steps=4)
    kernels = select("cpu", 1, "reference")
    figures, checks = measure_model(TINY, sizes, LIMITS, kernels, "cpu")
    assert [figure.name for figure in figures] == [
        decode_name(TINY, 1, 20),
        decode_name(TINY, 3, 9),
        "tiny: prefill of 8",
        "tiny: prefill of 17",
    ]
    assert all(figure.seconds > 0 and figure.limit_s > 0 for figure in figures)
    assert [check.is_passed for check in checks] == [True]
    assert checks[0].detail == "3 graphs, 0 allocations"


def test_a_replay_that_allocates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = itertools.count()
    monkeypatch.setattr("benchmarks.gpu.__main__.num_allocations", lambda: next(counts))
    sizes = StepPlanSizes(decode=((1, 20),), prefill=(8,), num_steps=4)
    _, checks = measure_model(TINY, sizes, LIMITS, select("cpu", 1, "reference"), "cpu")
    assert [check.is_passed for check in checks] == [False]


def report_of(figures: list[Figure], checks: list[Check]) -> Report:
    return Report("a card", "versions", LIMITS, checks, figures, TARGETS)


def test_report_names_targets_that_are_met_missed_and_not_measured() -> None:
    met = Figure(DECODE_TARGET, 1.0, 0.85, {"SDPA": 2.0})
    missed = Figure(PREFILL_TARGET, 1.0, 0.4, {"SDPA": None}, "SDPA: no")
    report = report_of([met, missed], [Check("graphs", True), Check("kernels", False, "3 failed")])
    text = report.to_markdown()
    assert "- met: decode attention at 64 × 4k tokens" in text
    assert "- MISSED: prefill attention" in text
    assert "- not measured: 8B decode step" in text
    assert "- FAILED: kernels (3 failed)" in text
    assert f"| {PREFILL_TARGET} | 1,000,000.0 | 400,000.0 | 40% | – | SDPA: no |" in text
    assert not report.is_passed
    content = json.loads(report.to_json())
    assert content["shares"][DECODE_TARGET] == 0.85
    assert content["is_passed"] is False


def test_report_passes_when_all_is_well() -> None:
    figures = [Figure(target.figure, 1.0, target.share) for target in TARGETS]
    assert report_of(figures, [Check("graphs", True)]).is_passed
    assert not report_of(figures, [Check("graphs", False)]).is_passed
    assert not report_of(figures[1:], []).is_passed


def test_target_is_a_share_of_the_limit() -> None:
    target = Target("x", 1 / 1.3, "x")
    assert target.verdict([Figure("x", 1.29, 1.0)])[0]
    assert not target.verdict([Figure("x", 1.31, 1.0)])[0]
    assert target.verdict([])[0] is None


@dataclass(frozen=True)
class Call:
    source: torch.Tensor
    out: torch.Tensor
    factor: int
    optional: torch.Tensor | None = None


def test_functions_travel_with_their_tensors_and_bring_changes_back() -> None:
    seen: list[int] = []

    def scaled(call: Call, extra: torch.Tensor, *, pair: tuple[torch.Tensor, int]) -> torch.Tensor:
        seen.append(call.source.data_ptr())
        call.out.copy_(call.source * call.factor + extra + pair[0] * pair[1])
        return call.out + 1

    whole = torch.zeros(4, 6)
    call = Call(torch.ones(4, 3), whole[:, 1:4], 2)
    result = travelling(scaled, "cpu")(call, torch.full((3,), 5.0), pair=(torch.ones(1), 3))
    assert seen != [call.source.data_ptr()]  # it saw a copy
    assert (result == 11).all()
    assert (whole[:, 1:4] == 10).all()
    assert (whole[:, [0, 4, 5]] == 0).all()
