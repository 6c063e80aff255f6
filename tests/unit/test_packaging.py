"""The top-level folders form one namespace: in the wheel, for imports and without torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIR: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
TORCH_FREE = ("common", "protos", "router", "gateway", "controlplane", "cli", "sim")
# Loaded where they are needed, never on import of their package.
NEEDS_TORCH = {"isthmus.controlplane.actuators.ray"}


def packages_on_disk() -> set[str]:
    found = set()
    for name, folder in PACKAGE_DIR.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([name, *parts]))
    return found


def modules_of(folder: str) -> list[str]:
    modules = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        modules.append(".".join(["isthmus", *(part for part in parts if part != "__init__")]))
    return modules


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_every_package_is_in_the_distribution() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_every_top_level_package_is_mapped() -> None:
    folders = {
        init.parent.name
        for init in ROOT.glob("*/__init__.py")
        if init.parent.name not in {"tests", "benchmarks"}  # not distributed
    }
    assert folders == set(PACKAGE_DIR.values())


def test_every_package_ships_its_types() -> None:
    missing = [name for name in PACKAGE_DIR.values() if not (ROOT / name / "py.typed").exists()]
    assert missing == []


def test_there_is_no_package_above_the_namespace() -> None:
    assert run("import isthmus; assert isthmus.__file__ is None").returncode == 0


@pytest.mark.timeout(180)
def test_control_side_runs_without_torch() -> None:
    modules = [
        module
        for folder in TORCH_FREE
        for module in modules_of(folder)
        if module not in NEEDS_TORCH and not module.endswith("__main__")
    ]
    program = (
        "import importlib, sys\n"
        "for name in ('torch', 'triton', 'ray', 'nixl_cu13', 'nixl', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"bare = {sorted(PACKAGE_DIR.values())!r}\n"
        "loaded = [m for m in sys.modules if m.partition('.')[0] in bare]\n"
        "assert not loaded, f'loaded under bare names: {loaded}'\n"
    )
    done = run(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(180)
def test_worker_side_is_loaded_once_under_its_real_names() -> None:
    program = (
        "import sys\n"
        "import isthmus.prefill_worker.main, isthmus.decode_worker.main\n"
        f"bare = {sorted(PACKAGE_DIR.values())!r}\n"
        "files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)]\n"
        f"ours = [f for f in files if f.startswith({str(ROOT)!r}) and 'site-packages' not in f]\n"
        "assert ours and len(ours) == len(set(ours)), 'a module is loaded twice'\n"
        "loaded = [m for m in sys.modules if m.partition('.')[0] in bare]\n"
        "assert not loaded, f'loaded under bare names: {loaded}'\n"
    )
    done = run(program)
    assert done.returncode == 0, done.stderr
