from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from isthmus.common.config import LoggingConfig
from isthmus.common.logging import configure_logging
from tests.support.tiny_model import ENGINE_DEFAULTS


@pytest.fixture(scope="session", autouse=True)
def plain_logs() -> Iterator[None]:
    """structlog's defaults draw tracebacks with all locals: seconds, where those are tensors."""
    configure_logging(LoggingConfig(format="json"))
    yield
    structlog.reset_defaults()


@pytest.fixture(params=["off", "on"])
def async_scheduling(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test twice: the tiny engines that it makes schedule so, unless it says otherwise."""
    ENGINE_DEFAULTS["async_scheduling"] = request.param
    yield request.param
    ENGINE_DEFAULTS.clear()
