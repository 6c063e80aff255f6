"""Every Triton kernel compiles for every target, without spilling more than it may."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from benchmarks.kernel_resources import page
from tests.support.triton_compile import (
    LARGEST_SHARED_BYTES,
    CompiledKernel,
    compile_all,
    compile_cases,
    kernel_modules,
)

CASES = [
    pytest.param(module, case, target, id=f"{module}-{case.label}-sm_{target}")
    for module, case in compile_cases()
    for target in case.targets
]
Compiled = dict[tuple[str, str, int], CompiledKernel]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return {(found.module, found.label, found.target): found for found in compile_all()}


@pytest.mark.timeout(600)  # the first of them waits for all: 45 s of a free core
@pytest.mark.parametrize(("module", "case", "target"), CASES)
def test_kernel_compiles_within_its_bounds(
    compiled: Compiled, module: str, case: object, target: int
) -> None:
    found = compiled[module, case.label, target]
    assert found.error == ""
    assert found.spill_bytes <= case.max_spill_bytes
    assert found.shared_bytes <= LARGEST_SHARED_BYTES[target]
    assert found.registers > 0


@pytest.mark.parametrize(("name", "module"), list(kernel_modules()), ids=str)
def test_every_kernel_that_is_launched_has_a_case(name: str, module: object) -> None:
    launched = {name for name in vars(module) if name.endswith("_kernel")}
    assert launched == {case.kernel.__name__ for case in vars(module).get("COMPILE_CASES", ())}


def test_the_page_of_resources_has_a_row_for_each_kernel() -> None:
    kernels = [
        CompiledKernel("norm", "a", 80, registers=40, shared_bytes=512, num_warps=4),
        CompiledKernel("norm", "a", 90, registers=33, num_warps=8, spill_bytes=16),
        CompiledKernel("rope", "b", 90, registers=255, num_warps=8),
    ]
    rows = [line for line in page(kernels).splitlines() if line.startswith("| `")]
    assert rows == [
        "| `a` | sm_80 | 4 | 40 | 512 | 0 | 12 |",
        "| `a` | sm_90 | 8 | 33 | 0 | 16 | 6 |",
        "| `b` | sm_90 | 8 | 255 | 0 | 0 | 1 |",
    ]


def test_cases_have_names_of_their_own() -> None:
    names = [(module, case.label) for module, case in compile_cases()]
    assert len(names) == len(set(names))
