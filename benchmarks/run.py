"""``make bench ARGS="NAME …"``: runs one measurement by name; without a name, lists them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = (
    "kernels", "limit", "engine", "pair", "idle", "goodput",
    "router", "overhead", "storm", "identity", "kernel_resources",
    "tensor_parallel", "layerwise", "simulator", "kv_dtype", "frontends",
    "sim_truth", "coverage", "overload",
)  # fmt: skip


def summary(name: str) -> str:
    file = HERE / f"{name}.py"
    file = file if file.exists() else HERE / name / "__main__.py"
    text = file.read_text(encoding="utf-8")
    return text.split('"""')[1].strip().splitlines()[0]


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        for name in NAMES:
            print(f"{name:17}{summary(name)}")
        sys.exit(0 if len(sys.argv) < 2 else 2)
    name = sys.argv.pop(1)
    sys.argv[0] = f"benchmarks.{name}"  # what --help calls it
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
