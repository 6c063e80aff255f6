"""Checks and times the engine on one GPU, in a few minutes: ``make gpu``.

    python -m benchmarks.gpu [--out DIR] [--skip numerics,kernels,steps]

In this order, each part printed as it ends:

numerics   every Triton kernel on the card against the reference, over the cases that the
           interpreter runs elsewhere, and the tests of ``tests/gpu`` (graphs, no hidden waiting)
kernels    each op against its limit, which is the card's measured copy bandwidth or bf16 matrix
           rate, and against torch where torch does the same
steps      whole decode and prefill steps of random-weight models of Llama's shapes

Writes gpu.json and gpu.md. The exit code is 0 when every check passed and every target was met,
1 when not, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.gpu.cases import DECODE_TARGET, PREFILL_TARGET, Case, Sizes, all_cases
from benchmarks.gpu.limits import CardLimits, measure_limits
from benchmarks.gpu.models import LLAMA_1B, LLAMA_8B, Shape, random_decoder
from benchmarks.gpu.report import Check, Figure, Report, Target
from benchmarks.gpu.steps import StepPlanSizes, decode_name, engine_config, measure_steps
from benchmarks.gpu.timing import CudaTimer, Timer, num_allocations
from isthmus.common.clock import SystemClock
from isthmus.common.config import EngineConfig
from isthmus.engine.core import EngineCore
from isthmus.engine.device import device_of
from isthmus.engine.device_runner import DeviceRunner
from isthmus.engine.kv_store import KvStore
from isthmus.engine.models.types import LanguageModel
from isthmus.kernels import Kernels, select

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "out" / "gpu"
NO_CARD = 2
PARTS = ("numerics", "kernels", "steps")
NUMERICS_DEADLINE_S = 150.0
NUMERICS = {
    "kernels against the reference": (
        *("-p", "tests.gpu.kernels_on_cuda", "tests/unit/kernels", "-k", "triton"),
        *("--deselect", "tests/unit/kernels/test_kernels_triton_compile.py"),
        *("--deselect", "tests/unit/kernels/test_kernels_triton_interpreter.py"),
    ),
    "engine on the card": ("-m", "gpu", "tests/gpu"),
}
SIZES = {
    LLAMA_1B: StepPlanSizes(decode=((1, 1024), (64, 1024)), prefill=(2048, 8192)),
    LLAMA_8B: StepPlanSizes(decode=((1, 1024), (16, 1024), (64, 1024)), prefill=(2048, 8192)),
}
DECODE_STEP_TARGET = decode_name(LLAMA_8B, 64, 1024)
TARGETS = (
    Target(DECODE_TARGET, 0.8, "decode attention at 64 × 4k tokens: 80 % of the copy bandwidth"),
    Target(PREFILL_TARGET, 0.6, "prefill attention: 60 % of the bf16 matrix rate"),
    Target(DECODE_STEP_TARGET, 1 / 1.3, "8B decode step, batch 64: 1.3 × its bandwidth limit"),
)


def run_numerics() -> list[Check]:
    """Each in a process of its own, on several cores: most of the time goes to compiling."""
    checks = []
    for name, arguments in NUMERICS.items():
        # Warnings of whatever torch and Triton are there say nothing of numerics.
        options = ["-q", "-n", "8", "--timeout", "120", "-W", "default"]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=NUMERICS_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            checks.append(Check(name, False, f"no end within {NUMERICS_DEADLINE_S:.0f} s"))
            continue
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
        if done.returncode != 0:
            print(done.stdout[-6000:], done.stderr[-2000:])
        checks.append(Check(name, done.returncode == 0, lines[-1]))
    return checks


def measure_kernels(
    cases: Iterable[Callable[[], Case]], timer: Timer, limits: CardLimits
) -> list[Figure]:
    """A case that fails to run is an error of ours; a library's that does not run is a note."""
    figures = []
    for make_case in cases:
        case = make_case()
        seconds = timer.seconds(case.ours)
        others, notes = {}, []
        for name, make_action in case.others.items():
            try:
                others[name] = timer.seconds(make_action())
            except Exception as error:  # noqa: BLE001 - whatever a library raises
                others[name] = None
                notes.append(f"{name}: {str(error).splitlines()[0][:80]}")
        limit_s = limits.seconds(case.num_bytes, case.flops)
        figures.append(Figure(case.name, seconds, limit_s, others, "; ".join(notes)))
    return figures


def measure_model(
    shape: Shape, sizes: StepPlanSizes, limits: CardLimits, kernels: Kernels, device: str
) -> tuple[list[Figure], list[Check]]:
    """An engine of random weights, from which nothing is left afterwards."""
    config = engine_config(sizes, device)
    longest = max(*(context for _, context in sizes.decode), *sizes.prefill)
    model = random_decoder(shape, kernels, device, max_model_len=longest + 64)
    runners: list[DeviceRunner] = []

    def runner_of(
        model: LanguageModel, kv_store: KvStore, config: EngineConfig, max_model_len: int
    ) -> DeviceRunner:
        runner = DeviceRunner(model, kernels, kv_store, config, max_model_len, device_of(device))
        runners.append(runner)
        return runner

    engine = EngineCore(model, config, SystemClock(), runner_of=runner_of)
    return measure_steps(engine, runners[0], shape, sizes, limits, num_allocations)


def run(parts: frozenset[str]) -> Report:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    checks: list[Check] = []
    if "numerics" in parts:
        checks += run_numerics()
        say("; ".join(f"{c.name}: {'passed' if c.is_passed else 'FAILED'}" for c in checks))
    timer, kernels = CudaTimer(), select("cuda")
    limits = measure_limits(timer, "cuda")
    say(f"{limits.bytes_per_s / 1e9:.0f} GB/s, {limits.flops_per_s / 1e12:.0f} TFLOP/s")
    figures: list[Figure] = []
    if "kernels" in parts:
        with torch.inference_mode():
            figures += measure_kernels(all_cases(kernels, Sizes(), "cuda"), timer, limits)
        say(f"{len(figures)} kernel cases")
    for shape, sizes in SIZES.items() if "steps" in parts else ():
        torch.cuda.empty_cache()
        found, replays = measure_model(shape, sizes, limits, kernels, "cuda")
        figures += found
        checks += replays
        say(f"{shape.name}: {len(found)} kinds of steps")
    card = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, {kernels.describe()}, CUDA {torch.version.cuda}"
    return Report(card, versions, limits, checks, figures, TARGETS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--skip", default="", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"make gpu needs an NVIDIA GPU: torch {torch.__version__} sees no CUDA device here. "
            "Nothing was checked.",
            file=sys.stderr,
        )
        return NO_CARD
    report = run(frozenset(PARTS) - set(options.skip.split(",")))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(report.to_json(), encoding="utf-8")
    (options.out / "gpu.md").write_text(report.to_markdown(), encoding="utf-8")
    print(report.to_markdown())
    return 0 if report.is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
