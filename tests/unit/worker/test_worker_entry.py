from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig
from isthmus.common.errors import ConfigError
from isthmus.worker.entry import CONFIG_VARIABLE, parse_args

ARGS = ["--instance-id", "decode-3", "--registry", "127.0.0.1:5"]


def test_the_configuration_comes_whole_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(ClusterConfig(name="other").model_dump_json())
    args = parse_args([*ARGS, "--config-json", str(file), "--role", "mixed"], list(Role))
    assert (args.role, args.instance_id, args.registry) == (Role.MIXED, "decode-3", "127.0.0.1:5")
    assert args.config.name == "other"


def test_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, ClusterConfig(name="env").model_dump_json())
    args = parse_args(ARGS, [Role.PREFILL])
    assert (args.role, args.config.name) == (Role.PREFILL, "env")


def test_what_is_no_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, '{"nmae": "x"}')
    with pytest.raises(ConfigError, match="nmae"):
        parse_args(ARGS, [Role.PREFILL])


def test_a_role_that_the_program_does_not_have_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_args([*ARGS, "--role", "prefill"], [Role.DECODE, Role.MIXED])
    assert "prefill" in capsys.readouterr().err
