"""Compiles the Triton kernels ahead of time for real GPUs; no GPU and no driver is needed.

Run as a program it compiles every ``CompileCase`` of ``isthmus.kernels.triton`` for every target
and writes one JSON line for each to standard output: it must be a process of its own, since Triton
must not have been imported to interpret. What ptxas says of a kernel is in its log; Triton gives it
to whoever asks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from isthmus.kernels import triton as kernels_triton
from isthmus.kernels.triton.compilation import SM_80, SM_90, SM_100, CompileCase

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 570.0
LARGEST_SHARED_BYTES = {SM_80: 163 * 1024, SM_90: 227 * 1024, SM_100: 227 * 1024}
"""Of one thread block; CUDA C++ Programming Guide, table of technical specifications."""

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """``error`` is empty where it compiled; then the rest is known."""

    module: str
    label: str
    target: int
    error: str = ""
    registers: int = 0  # of a thread
    shared_bytes: int = 0  # of a thread block
    stack_bytes: int = 0  # of a thread
    spill_bytes: int = 0  # of a thread
    num_warps: int = 0


def kernel_modules() -> Iterator[tuple[str, ModuleType]]:
    """The modules that hold kernels or declare cases, under their own names."""
    for found in pkgutil.iter_modules(kernels_triton.__path__):
        module = importlib.import_module(f"{kernels_triton.__name__}.{found.name}")
        names = vars(module)
        if "COMPILE_CASES" in names or any(name.endswith("_kernel") for name in names):
            yield found.name, module


def compile_cases() -> Iterator[tuple[str, CompileCase]]:
    """Every case with its module's name."""
    for name, module in kernel_modules():
        for case in vars(module).get("COMPILE_CASES", ()):
            yield name, case


def compile_all() -> list[CompiledKernel]:
    """Compiles everything in one child process, with a cache that is thrown away."""
    with tempfile.TemporaryDirectory() as cache:
        settings = {"TRITON_CACHE_DIR": cache, "TRITON_ALWAYS_COMPILE": "1"}
        inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env=inherited | settings,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"compiling ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return [CompiledKernel(**json.loads(line)) for line in done.stdout.splitlines()]


def compile_case(module: str, case: CompileCase, target: int) -> CompiledKernel:
    """In this process; what does not compile is described, not raised."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    unknown = (set(case.types) | set(case.constants) | case.aligned) - set(names)
    missing = set(names) - set(case.types) - set(case.constants)
    if unknown or missing:
        error = f"arguments unknown: {sorted(unknown)}, without a type: {sorted(missing)}"
        return CompiledKernel(module, case.label, target, error)
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.types.get(name, "constexpr") for name in names},
        constexprs=dict(case.constants),
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name in case.aligned or case.types.get(name, "").startswith("*")
        },
    )
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": case.has_fp_fusion,
    }
    knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, GPUTarget("cuda", target, 32), options)
    except Exception as error:  # noqa: BLE001 - Triton raises what its passes raise
        text = f"{type(error).__name__}: {error}"
        return CompiledKernel(module, case.label, target, text[-2000:])
    return _described(module, case, target, compiled.metadata.shared, log.getvalue())


def _described(
    module: str, case: CompileCase, target: int, shared_bytes: int, log: str
) -> CompiledKernel:
    registers, spills = _REGISTERS.search(log), _SPILLS.search(log)
    if registers is None or spills is None:
        return CompiledKernel(module, case.label, target, f"ptxas said nothing of use: {log}")
    return CompiledKernel(
        module,
        case.label,
        target,
        registers=int(registers[1]),
        shared_bytes=shared_bytes,
        stack_bytes=int(spills[1]),
        spill_bytes=int(spills[2]),
        num_warps=case.num_warps,
    )


def main() -> None:
    for module, case in compile_cases():
        for target in case.targets:
            print(json.dumps(asdict(compile_case(module, case, target))), flush=True)


if __name__ == "__main__":
    main()
