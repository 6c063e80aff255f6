from __future__ import annotations

import json
import socket

import pytest

from isthmus.cli.commands import doctor
from isthmus.cli.commands.doctor import Level
from isthmus.cli.output import OutputFormat
from isthmus.common.config import load_config
from isthmus.common.errors import ConfigError


def test_what_is_missing_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    findings = [
        doctor.check_torch(),
        doctor.check_nixl(),
        doctor.check_ray(),
        doctor.check_compiler(),
        doctor.check_kernels(),
        doctor.check_sample_model(),
    ]
    assert all(finding.level is not Level.OK and finding.advice for finding in findings)
    assert doctor.check_compiler().level is Level.WARN  # torch's kernels do it, slower


def test_what_is_there_is_ok() -> None:
    for check in (doctor.check_python, doctor.check_torch, doctor.check_sample_model):
        assert check().level is Level.OK


def test_too_little_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**20)
    finding = doctor.check_memory()
    assert finding.level is Level.FAIL
    assert "not enough memory" in finding.advice


def test_taken_port_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        class Defaults:
            class gateway:  # noqa: N801 (stands for a field)
                host = "127.0.0.1"

        Defaults.gateway.port = port  # type: ignore[attr-defined]
        monkeypatch.setattr(doctor, "ClusterConfig", Defaults)
        finding = doctor.check_port()
    assert finding.level is Level.WARN
    assert "--port" in finding.advice


def test_kernels_are_listed_op_by_op_with_the_reason(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    overrides = {"mixed": {"engine": {"kernels": {"silu_mul": "reference"}}}}
    listed = doctor.list_kernels(load_config(overrides=overrides, environ={}))
    plain, overridden = (engine for engine in listed if engine["device"] == "cpu")
    assert plain["description"].startswith(("cpu", "reference"))
    choices = {choice["op"]: choice for choice in overridden["ops"]}
    assert choices["silu_mul"]["implementation"] == "reference"
    assert choices["silu_mul"]["reason"] == "overridden"
    assert all(choice["reason"] for choice in plain["ops"])
    doctor.show_kernels(listed, OutputFormat.JSON)
    assert json.loads(capsysbinary.readouterr().out) == listed
    doctor.show_kernels(listed, OutputFormat.TEXT)
    assert "overridden" in capsysbinary.readouterr().out.decode()


def test_kernels_that_are_not_to_be_had_are_one_sentence() -> None:
    overrides = {"decode": {"engine": {"kernels": {"silu_mull": "reference"}}}}
    with pytest.raises(ConfigError, match=r"^engine\.kernels: unknown op 'silu_mull'"):
        doctor.list_kernels(load_config(overrides=overrides, environ={}))
