from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from isthmus.common.config import LoggingConfig
from isthmus.common.logging import configure_logging


@pytest.fixture(scope="session", autouse=True)
def plain_logs() -> Iterator[None]:
    """structlog's defaults draw tracebacks with all locals: seconds, where those are tensors."""
    configure_logging(LoggingConfig(format="json"))
    yield
    structlog.reset_defaults()
