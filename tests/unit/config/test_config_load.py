from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.common.config import ClusterConfig, load_config
from isthmus.common.errors import ConfigError


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(environ={}) == ClusterConfig()


def test_later_sources_win(tmp_path: Path) -> None:
    file = written(tmp_path, "gateway: {port: 1, max_inflight: 7}\nrouter: {policy: round_robin}\n")
    environ = {"ISTHMUS_GATEWAY__PORT": "2", "ISTHMUS_ROUTER__POLICY": "least_loaded"}
    config = load_config(file, {"gateway": {"port": 3}}, environ)
    assert config.gateway.port == 3
    assert config.router.policy == "least_loaded"
    assert config.gateway.max_inflight == 7


def test_part_of_a_pool_keeps_its_other_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "prefill: {engine: {block_size: 32}}\n"), environ={})
    assert config.prefill.replicas == 1
    assert config.prefill.engine.block_size == 32
    assert config.decode == ClusterConfig().decode


def test_empty_file_is_no_change(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing\n"), environ={}) == ClusterConfig()


def test_variables_of_one_level_are_not_configuration() -> None:
    environ = {"ISTHMUS_PROCESS_CONFIG": "{}", "ISTHMUS_X": "1", "OTHER__GATEWAY__PORT": "9"}
    assert load_config(environ=environ) == ClusterConfig()


def test_variables_of_one_level_set_texts_at_the_top() -> None:
    environ = {"ISTHMUS_STATE_DIR": "/7", "ISTHMUS_NAME": "12", "ISTHMUS_HOST": ""}
    config = load_config(environ=environ)
    assert (config.state_dir, config.name) == ("/7", "12")
    assert config.host == ClusterConfig().host


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gatway: {port: 1}", "unknown key 'gatway'; did you mean 'gateway'?"),
        ("gateway: {prot: 1}", "unknown key 'gateway.prot'; did you mean 'gateway.port'?"),
        ("decode: {engine: {blok_size: 8}}", "did you mean 'decode.engine.block_size'?"),
        ("prefill: {engine: {pp_size: 2}}", "unknown key 'prefill.engine.pp_size'"),
        ("gateway: {qqqqqq: 1}", "known keys here: api_keys, "),
        ("gateway: {port: 70000}", "gateway.port: Input should be less than or equal to 65535"),
        ("gateway: {port: x}", "gateway.port: Input should be a valid integer"),
        ("model: {dtype: float16}", "model.dtype: "),
        ("prefill:", "prefill: Input should be a valid dictionary"),
        (
            "gateway: {request_timeout_ms: 660000}",
            "router.reservation_ttl_ms (660000) must be more than gateway.request_timeout_ms "
            "(660000), else the router forgets requests that still wait",
        ),
        ("- 1", "must hold a mapping, not list"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), environ={})
    assert sentence in caught.value.message


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "gateway: {port: -1, hots: x}"), environ={})
    assert len(caught.value.message.splitlines()) == 2


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml", environ={})


def test_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(environ={}).name = "other"  # type: ignore[misc]


@given(
    port=st.integers(0, 65_535),
    replicas=st.integers(0, 9),
    keys=st.lists(st.text(max_size=5)),
    gib=st.floats(0.01, 100),
)
def test_configuration_survives_the_way_to_another_process(
    port: int, replicas: int, keys: list[str], gib: float
) -> None:
    tree = {
        "gateway": {"port": port, "api_keys": keys},
        "decode": {"replicas": replicas, "engine": {"kv_cache_gib": gib}},
    }
    config = load_config(overrides=tree, environ={})
    assert ClusterConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".a", "a b", "ä", "a" * 64])
def test_a_name_that_cannot_name_a_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        load_config(overrides={"name": name}, environ={})


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_block_holds_at_least_one_token(block_size: int) -> None:
    with pytest.raises(ConfigError, match="block_size"):
        load_config(overrides={"prefill": {"engine": {"block_size": block_size}}}, environ={})


@pytest.mark.parametrize(("written_as", "meant"), [("on", "on"), ("off", "off"), ('"on"', "on")])
def test_a_bare_on_or_off_is_no_truth_value(tmp_path: Path, written_as: str, meant: str) -> None:
    text = f"mixed: {{engine: {{async_scheduling: {written_as}}}}}\n"
    assert load_config(written(tmp_path, text), environ={}).mixed.engine.async_scheduling == meant


def test_int8_weights_are_refused_on_another_device(tmp_path: Path) -> None:
    text = "model: {quantization: int8}\nmixed: {engine: {device: 'cuda:0'}}\n"
    with pytest.raises(ConfigError, match="int8 runs on the CPU only, and device is cuda:0"):
        load_config(written(tmp_path, text), environ={})
