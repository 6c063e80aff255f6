from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from isthmus.common.memory import available_memory


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


def write_cgroup(folder: Path, limit: str, used: int, inactive_file: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nslab 1\n")


def test_without_a_container_it_is_the_machines(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 1000


@pytest.mark.parametrize(
    ("limit", "used", "inactive_file", "expected"),
    [
        ("max", 900, 0, 1000),
        ("800", 500, 0, 300),
        ("800", 500, 100, 400),  # cached files give way
        ("5000", 500, 0, 1000),
        ("800", 900, 0, 0),
    ],
)
def test_a_containers_limit_counts(
    limit: str, used: int, inactive_file: int, expected: int, tmp_path: Path
) -> None:
    write_cgroup(tmp_path, limit, used, inactive_file)
    assert available_memory(tmp_path) == expected
