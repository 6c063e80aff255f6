from __future__ import annotations

import os

import pytest

from isthmus.controlplane.actuators.ray_environment import prepare_environment, private_environment


def test_private_ray_is_closed_to_others() -> None:
    settings = private_environment()
    assert settings["RAY_AUTH_MODE"] == "token"
    assert len(settings["RAY_AUTH_TOKEN"]) == 64
    assert settings["RAY_AUTH_TOKEN"] != private_environment()["RAY_AUTH_TOKEN"]
    assert settings["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_ray_that_is_joined_keeps_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_AUTH_MODE": "disabled"})
    prepare_environment("10.0.0.1:6379")
    assert os.environ == {"RAY_AUTH_MODE": "disabled"}
    prepare_environment("")
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["OMP_NUM_THREADS"] == "1"
