from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from rich.console import Console

from isthmus.cli import output
from isthmus.cli.commands import up as up_command
from isthmus.cli.commands.config import MASK
from isthmus.cli.commands.status import describe_pairs
from isthmus.cli.commands.up import banner, overrides
from isthmus.cli.main import main
from isthmus.common.cluster import Role
from isthmus.common.config import ClusterConfig, load_config
from isthmus.common.errors import ConfigError
from isthmus.controlplane.client import ClusterStatus, InstanceStatus
from isthmus.controlplane.progress import ReadyCluster, ReadyInstance
from isthmus.controlplane.state_file import ClusterState, process_start, write_state

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Run]:
    """Runs the command line in this process; returns exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run_main(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capfdbinary.readouterr()
        return int(ended.value.code or 0), out.decode(), err.decode()

    yield run_main
    structlog.reset_defaults()  # `up` makes logs go to a stderr that is this test's alone
    structlog.contextvars.clear_contextvars()


def test_version_in_both_forms(run: Run) -> None:
    assert run("version")[1].startswith("isthmus 0.")
    assert run("--version") == run("version")
    assert json.loads(run("version", "--output", "json")[1])["version"].startswith("0.")


def test_no_command_shows_the_list(run: Run) -> None:
    out = "".join(run()[1:])
    assert all(name in out for name in ("up", "down", "status", "chat", "doctor", "config"))


def test_config_check_prints_the_effective_tree(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gateway: {port: 9, api_keys: [secret]}\n")
    code, out, _ = run("config", "check", str(file), "--set", "decode.replicas=3")
    tree = yaml.safe_load(out)
    assert code == 0
    assert (tree["gateway"]["port"], tree["decode"]["replicas"]) == (9, 3)
    assert tree["gateway"]["api_keys"] == [MASK]
    assert "secret" not in out
    assert json.loads(run("config", "check", str(file), "-o", "json")[1])["gateway"]["port"] == 9


def test_config_check_warns_of_what_the_policy_ignores(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "slo: {classes: {gold: {ttft_ms: 9, mode: strict}}}\n"
        "tenants:\n"
        "  acme: {api_keys: [a], weight: 2}\n"
        "  lab: {api_keys: [b], max_inflight: 3}\n"
    )
    plain = ("--set", "router.policy=least_predicted_load")
    code, out, err = run("config", "check", str(file), "-o", "json", *plain)
    assert code == 0
    assert json.loads(out)["slo"]["classes"]["gold"]["mode"] == "strict"
    assert "without effect under router.policy least_predicted_load" in err
    assert "slo.classes.gold.mode, tenants.acme.weight (" in err
    assert run("config", "check", str(file))[2] == ""
    assert run("config", "check", *plain)[2] == ""


def test_config_check_warns_of_a_strict_class_that_can_refuse_nothing(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("slo: {classes: {gold: {mode: strict}, fast: {e2e_ms: 9, mode: strict}}}\n")
    code, _, err = run("config", "check", str(file))
    assert code == 0
    assert "slo.classes.gold is strict and has no target" in err
    assert "slo.classes.fast" not in err


def test_unknown_key_names_the_nearest(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gateway: {prot: 9}\n")
    code, out, err = run("config", "check", str(file))
    assert (code, out) == (1, "")
    assert err == "Error: unknown key 'gateway.prot'; did you mean 'gateway.port'?\n"


def test_error_as_json_is_on_stdout(run: Run) -> None:
    code, out, _ = run("status", "-o", "json")
    assert code == 1
    assert json.loads(out)["error"]["code"] == "config_error"


@pytest.mark.parametrize("command", ["status", "down", "chat"])
def test_commands_need_a_running_cluster(run: Run, command: str) -> None:
    code, _, err = run(command, "--name", "nobody")
    assert code == 1
    assert err.startswith("Error: no cluster named nobody is running")
    assert len(err.splitlines()) == 1


def test_unknown_option_is_a_usage_error(run: Run) -> None:
    code, _, err = run("up", "--prot", "1")
    assert code == 2
    assert "--prot" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["up", "--model", "/no/such/model"], "there is no model at /no/such/model"),
        (["up", "--port", "99999"], "gateway.port: Input should be less than"),
        (["up", "--decode", "0"], "nothing would decode"),
        (["up", "--set", "router"], "--set needs key.path=value"),
        (["up", "--set", "router.policy=[", "--decode", "1"], "the value is not valid YAML"),
        (["up", "--kv-cache-gib", "100000", "--actuator", "process"], "not enough memory: about"),
    ],
)
def test_up_refuses_in_one_sentence(run: Run, arguments: list[str], sentence: str) -> None:
    code, out, err = run(*arguments)
    assert code == 1
    assert out == ""
    assert sentence in err.splitlines()[-1]
    assert "Traceback" not in err


def test_second_cluster_of_a_name_is_refused(run: Run, tmp_path: Path) -> None:
    pid = os.getpid()
    state = ClusterState(
        "isthmus", pid, process_start(pid) or 0.0, "c", "r", "http://127.0.0.1:8", "m", "/l"
    )
    write_state(tmp_path / "isthmus", state)
    code, _, err = run("up")
    assert code == 1
    assert f"already running at http://127.0.0.1:8 (pid {pid})" in err


@pytest.mark.parametrize("how", ["option", "variable", "setting"])
def test_a_state_folder_of_its_own_is_looked_up_by_every_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A control process that is no server: found, but it does not answer."""
    pid = os.getpid()
    state = ClusterState(
        "isthmus", pid, process_start(pid) or 0.0, "127.0.0.1:1", "r", "http://127.0.0.1:1", "m", ""
    )
    write_state(tmp_path / "own", state)
    monkeypatch.chdir(tmp_path)
    options = {"option": ["--state-dir", "own"], "variable": [], "setting": []}[how]
    if how == "variable":
        monkeypatch.setenv("ISTHMUS_STATE_DIR", str(tmp_path / "own"))
    if how != "setting":
        for command in (["status"], ["scale", "decode", "2"], ["chat", "-m", "hi"]):
            code, _, err = run(*command, *options)
            assert code == 1
            assert "127.0.0.1:1" in err
        _, _, err = run("down", "--name", "other", *options)
        folder = options[-1] if options else str(tmp_path / "own")
        assert f"no cluster named other is running on this machine, going by {folder}" in err
    up = ["--set", "state_dir=own"] if how == "setting" else options
    code, _, err = run("up", *up)
    assert code == 1
    assert f"already running at http://127.0.0.1:1 (pid {pid})" in err


def effective(flags: dict[str, object], *settings: str) -> ClusterConfig:
    return load_config(overrides=overrides(flags, list(settings)), environ={})


def test_flags_and_settings_become_one_tree() -> None:
    flags: dict[str, object] = {"gateway.port": 5, "prefill.replicas": None}
    config = effective(flags, "gateway.port=6", "decode.engine={block_size: 8, num_threads: 2}")
    assert config.gateway.port == 6
    assert config.decode.engine.block_size == 8
    assert config.decode.engine.num_threads == 2
    assert config.prefill.replicas == 1


def test_mixed_instances_alone_need_no_pair() -> None:
    config = effective({"mixed.replicas": 2})
    assert (config.prefill.replicas, config.decode.replicas, config.mixed.replicas) == (0, 0, 2)
    config = effective({"mixed.replicas": 1, "prefill.replicas": 1})
    assert (config.prefill.replicas, config.decode.replicas) == (1, 0)


def test_setting_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="port is a value, not a group"):
        overrides({"gateway.port": 1}, ["gateway.port.x=2"])


READY = ReadyCluster(
    cluster="c",
    url="http://127.0.0.1:8000",
    model="m[0]",
    pid=1,
    log_dir="/logs",
    state_dir="/state/of ours",
    seconds=3.0,
    instances=(ReadyInstance("decode-0", "decode", "a:1", "a:2", 77, 1),),
)


def test_banner_gives_a_command_that_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    up_command.stdout.print(banner(READY))
    out = capsys.readouterr().out
    assert "http://127.0.0.1:8000/v1" in out
    assert "decode-0 (pid 77)" in out
    body = out.split("-d '")[1].split("'")[0]
    assert json.loads(body)["model"] == "m[0]"


def test_banner_shows_where_the_key_goes(capsys: pytest.CaptureFixture[str]) -> None:
    up_command.stdout.print(banner(READY, needs_key=True))
    assert '-H "Authorization: Bearer $KEY" ' in capsys.readouterr().out
    up_command.stdout.print(banner(READY))
    assert "Authorization" not in capsys.readouterr().out


def test_banner_says_how_other_commands_find_the_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    up_command.stdout.print(banner(READY, is_detached=True))
    out = capsys.readouterr().out
    assert "  state      /state/of ours\n" in out
    assert "isthmus down --name c --state-dir '/state/of ours')" in out
    assert "isthmus chat --name c --state-dir '/state/of ours'\n" in out
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    usual = replace(READY, cluster="isthmus", state_dir="/state/isthmus")
    up_command.stdout.print(banner(usual, is_detached=True))
    out = capsys.readouterr().out
    assert "isthmus down)" in out
    assert "isthmus chat\n" in out
    assert "state  " not in out


def test_ready_cluster_as_json(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    up_command.show_ready(READY, up_command.OutputFormat.JSON)
    printed: dict[str, Any] = json.loads(capfdbinary.readouterr().out)
    assert printed["instances"][0]["instance_id"] == "decode-0"


def test_a_narrow_terminal_cuts_no_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "stdout", Console(width=20))
    made = output.table("instance", "state")
    made.add_row("prefill-0" * 3, "draining" * 3)
    output.print_table(made)
    assert ["prefill-0" * 3, "draining" * 3] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


@pytest.mark.parametrize(
    ("found", "name"), [("/usr/bin/isthmus", "isthmus"), (None, ".venv/bin/isthmus")]
)
def test_banner_names_a_program_that_the_shell_finds(
    found: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / ".venv" / "bin" / "isthmus"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    monkeypatch.setattr("shutil.which", lambda _: found)
    assert up_command.program_name() == name


def test_status_names_what_kv_goes_over_once_for_each_pair() -> None:
    def instance(name: str, connectors: dict[str, str]) -> InstanceStatus:
        return InstanceStatus(name, Role.DECODE, 1, 0, "", None, None, connectors)

    cluster = ClusterStatus(
        "c",
        "m",
        "http://localhost",
        (
            instance("decode-0", {"prefill-0": "shm"}),
            instance("prefill-0", {"decode-0": "shm", "decode-1": "nixl"}),
        ),
    )
    assert describe_pairs(cluster) == [
        "decode-0 – prefill-0: KV over shm",
        "decode-1 – prefill-0: KV over nixl",
    ]
