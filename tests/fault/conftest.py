"""One model and one oracle for all tests that break a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Oracle, write_serving_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_serving_model(tmp_path_factory.mktemp("serving") / "tiny")


@pytest.fixture(scope="session")
def oracle(model: Path) -> Iterator[Oracle]:
    oracle = Oracle(model)
    yield oracle
    oracle.close()
