"""Marks for tests of what is not installed everywhere."""

from __future__ import annotations

import importlib.util

import pytest

needs_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="needs the wheel ucxx-cu12: the extra ucx"
)
