from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from isthmus.common.config import ClusterConfig, load_config
from isthmus.common.errors import ConfigError, ModelFileError
from isthmus.common.model_files import ModelFiles, ModelKind
from isthmus.controlplane import preflight
from isthmus.controlplane.preflight import GIB, MemoryEstimate


def config_of(**tree: Any) -> ClusterConfig:
    return load_config(overrides=tree, environ={})


def model_folder(folder: Path, num_bytes: int, **config: Any) -> ModelFiles:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(num_bytes))
    return ModelFiles(ModelKind.HF, folder)


def test_port_in_use_is_one_sentence_that_names_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use.*--port"):
            preflight.probe_port("127.0.0.1", port, "--port")


def test_port_zero_becomes_a_free_one() -> None:
    port = preflight.probe_port("127.0.0.1", 0, "--port")
    assert preflight.probe_port("127.0.0.1", port, "--port") == port


def test_no_host_means_any_as_it_does_to_the_gateway() -> None:
    port = preflight.probe_port("", 0, "--port")
    assert preflight.probe_port("", port, "--port") == port


def test_a_shared_port_is_none_of_the_gateways_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "probe_ports", lambda *_: 9_000)
    gateway = {"port": 9_000, "replicas": 2, "shared_port": 9_001}
    with pytest.raises(ConfigError, match=r"port 9001 is a gateway's own already"):
        preflight.check(config_of(gateway=gateway))


def test_unknown_host_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid"):
        preflight.probe_port("no.such.host.invalid", 1, "--port")


def test_weights_count_in_the_dtype_that_is_loaded(tmp_path: Path) -> None:
    files = model_folder(tmp_path, 1000, torch_dtype="bfloat16")
    assert preflight.weight_bytes(config_of().model, files) == 1000
    float32 = config_of(model={"dtype": "float32"}).model
    assert preflight.weight_bytes(float32, files) == 2000


def test_broken_model_configuration_is_named(tmp_path: Path) -> None:
    files = model_folder(tmp_path, 10)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        preflight.weight_bytes(config_of().model, files)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.5}}, 160),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 32,
                },
            },
            256,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "novel"}}, None),
        ({}, None),
    ],
)
def test_a_length_beyond_the_models_is_refused_before_anything_starts(
    tmp_path: Path, config: dict[str, Any], longest: int | None
) -> None:
    files = model_folder(tmp_path, 10, **config)
    preflight.check_length(0, files)
    if longest is None:
        preflight.check_length(10**6, files)
        return
    preflight.check_length(longest, files)
    message = f"max_model_len {longest + 1} is beyond the model's limit of {longest} tokens"
    with pytest.raises(ConfigError, match=message):
        preflight.check_length(longest + 1, files)


def test_the_limit_of_a_gguf_file_is_in_its_header(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="limit of 128 tokens; choose a smaller --max-model-len"):
        preflight.check_length(129, ModelFiles(ModelKind.GGUF, file))


def test_estimate_adds_every_instance_up(tmp_path: Path) -> None:
    files = model_folder(tmp_path, 4 * GIB // 4096, torch_dtype="bfloat16")
    weights = 4 * GIB // 4096
    engine = {"kv_cache_gib": 2.0}
    config = config_of(
        prefill={"replicas": 1, "engine": engine},
        decode={"replicas": 3, "engine": engine},
        lifecycle={"actuator": "process"},
    )
    each = preflight.PROCESS_BYTES + weights + 2 * GIB
    assert preflight.estimate_memory(config, files).total == 4 * each + preflight.CONTROL_BYTES


def test_too_little_memory_says_how_much_is_needed_and_free() -> None:
    estimate = MemoryEstimate(instances={}, rest=3 * GIB)
    with pytest.raises(ConfigError, match=r"about 3\.0 GiB .* 1\.0 GiB are free"):
        preflight.check_memory(estimate, GIB)
    preflight.check_memory(estimate, 3 * GIB)


def test_a_cluster_that_cannot_decode_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing would decode"):
        preflight.check(config_of(decode={"replicas": 0}))


def test_paths_mean_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = config_of(state_dir="own", model={"path": "models/m"})
    config = preflight.with_absolute_paths(relative)
    assert config.state_dir == str(tmp_path / "own")
    assert config.model.path == str(tmp_path / "models" / "m")
    assert preflight.with_absolute_paths(config_of()) == config_of()


def test_missing_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"torch is not installed: pip install"):
        preflight.check(config_of())
