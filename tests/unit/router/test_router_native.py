"""How the compiled policy is found, and done without."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.common.cluster import Role
from isthmus.router.native import CompiledBlocks, Weigher, binding, compiled_blocks, weigher
from tests.support.router_cluster import Cluster, make_query


@pytest.fixture
def looks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before stays out of this test, and what it finds out of others."""
    for module in (weigher, compiled_blocks):
        monkeypatch.setattr(module, "compiled_library", binding.compiled_library.__wrapped__)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_anew: None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_python_decides() -> None:
    assert Weigher.create(0, 500.0) is None
    assert CompiledBlocks.create() is None
    cluster = Cluster(2, 2, policy="goodput")
    decision = cluster.router.submit(make_query()).decision
    assert decision.prefill is not None
    assert decision.policy == "goodput"


@pytest.mark.usefixtures("looks_anew")
def test_a_user_without_a_home_has_python_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert Weigher.create(0, 500.0) is None
    assert CompiledBlocks.create() is None


@pytest.mark.skipif(Weigher.create(0, 0.0) is None, reason="needs a C++ compiler")
def test_columns_that_come_and_go_are_looked_up_anew() -> None:
    """Each rebuilt table has arrays of its own, and only those are read."""
    cluster = Cluster(1, 1, policy="goodput")
    cluster.router.submit(make_query(name="0"))
    for number in range(1, 6):
        for prefix, role in (("p", "prefill"), ("d", "decode")):
            cluster.join(f"{prefix}{number}", Role(role))
        chosen = cluster.router.submit(make_query(name=str(number))).decision
        assert chosen.prefill is not None
        assert chosen.prefill.instance_id == f"p{number}"  # nobody has been chosen less recently
        assert chosen.decode.instance_id == f"d{number}"
