"""What is wrong with a model is said once, clearly, before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.common.config import ModelConfig
from isthmus.common.errors import (
    ConfigError,
    ModelError,
    ModelFileError,
    ModelTooLargeError,
    UnknownArchitectureError,
)
from isthmus.engine.models import loader
from isthmus.engine.models.loader import load_model, load_spec
from isthmus.engine.models.weights import WeightReader
from tests.support.tiny_models import save, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_model("llama"), tmp_path / "tiny-llama")


def load(folder: Path, device: str = "cpu", **model: Any) -> Any:
    return load_model(ModelConfig(path=str(folder), **model), device, 1)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "DROP"}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_spec_describes_the_model(folder: Path) -> None:
    spec = load_spec(ModelConfig(path=str(folder)))
    assert spec == load(folder).spec
    assert (spec.name, spec.architecture) == ("tiny-llama", "LlamaForCausalLM")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.hidden_size, spec.vocab_size, spec.max_model_len) == (64, 96, 64)
    assert (spec.dtype, spec.sliding_window, spec.eos_token_ids) == ("float32", None, (2,))
    parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert spec.weight_bytes == 4 * parameters
    assert load_spec(ModelConfig(path=str(folder), served_name="mine")).name == "mine"


def test_sliding_window_is_the_models_only_if_every_layer_slides(tmp_path: Path) -> None:
    all_layers = save(tiny_model("mistral-sliding"), tmp_path / "mistral")
    assert load_spec(ModelConfig(path=str(all_layers))).sliding_window == 8
    some_layers = save(tiny_model("qwen2-sliding"), tmp_path / "qwen2")
    assert load_spec(ModelConfig(path=str(some_layers))).sliding_window is None


def test_auto_dtype_is_the_checkpoints(folder: Path) -> None:
    assert load(folder).spec.dtype == "float32"
    for stored in (torch.bfloat16, torch.float16):
        tensors = load_file(folder / "model.safetensors")
        edit_tensors(folder, **{name: tensor.to(stored) for name, tensor in tensors.items()})
        assert load(folder).spec.dtype == "bfloat16"
    assert load(folder, dtype="float32").spec.dtype == "float32"


def test_end_tokens_of_the_generation_config_win(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_spec(ModelConfig(path=str(folder))).eos_token_ids == (7, 9)
    (folder / "generation_config.json").write_text("{}")
    assert load_spec(ModelConfig(path=str(folder))).eos_token_ids == (2,)


def test_fingerprint_is_the_same_in_another_process(folder: Path) -> None:
    program = (
        "import sys; from isthmus.common.config import ModelConfig;"
        "from isthmus.engine.models.loader import load_spec;"
        "print(load_spec(ModelConfig(path=sys.argv[1])).fingerprint)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert other.stdout.strip() == load_spec(ModelConfig(path=str(folder))).fingerprint


def test_fingerprint_changes_with_all_that_kv_depends_on_and_nothing_else(folder: Path) -> None:
    def fingerprint(**model: Any) -> str:
        return load_spec(ModelConfig(path=str(folder), **model)).fingerprint

    first = fingerprint()
    assert fingerprint(max_model_len=32, served_name="other") == first
    assert fingerprint(dtype="bfloat16") != first
    edit_config(folder, eos_token_id=5)
    (folder / "generation_config.json").unlink()
    assert fingerprint() == first
    edit_config(folder, rms_norm_eps=1e-4)
    second = fingerprint()
    assert second != first
    name = "model.layers.1.mlp.up_proj.weight"
    changed = load_file(folder / "model.safetensors")[name]
    changed[3, 5] += 1e-3
    edit_tensors(folder, **{name: changed})
    assert fingerprint() != second


def test_tensors_that_follow_from_others_are_allowed(folder: Path) -> None:
    edit_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFileError, match=r"model\.safetensors is damaged or cut short"):
        load(folder)


def test_missing_misshapen_and_unknown_tensors_are_named_together(folder: Path) -> None:
    edit_tensors(
        folder,
        **{
            "model.norm.weight": None,
            "model.layers.0.mlp.up_proj.weight": torch.zeros(128, 63),
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
        },
    )
    with pytest.raises(ModelFileError) as caught:
        load(folder)
    assert "missing tensors: model.norm.weight;" in caught.value.message
    assert "up_proj.weight is [128, 63] instead of [128, 64]" in caught.value.message
    assert "does not have: model.layers.0.self_attn.q_proj.bias" in caught.value.message


def test_long_lists_of_missing_tensors_are_cut(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    with pytest.raises(ModelFileError, match=r"model\.layers\.2\..* and 13 more$"):
        load(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path, is_sharded=True)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFileError, match=f"lacks {shard.name}, named in its index"):
        load(folder)


def test_quantised_weights_are_refused(folder: Path) -> None:
    edit_tensors(folder, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    with pytest.raises(ModelFileError, match=r"tensor model\.norm\.weight is torch\.int8"):
        load(folder)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnknownArchitectureError, match="quantised by 'gptq'"):
        load(folder)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no model at"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelFileError, match=r"holds no config\.json"):
        load(tmp_path)


def test_directory_without_safetensors_names_what_it_has(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pickled weights.*: pytorch_model\.bin"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read .*config.json"),
        ("[1]", "does not hold a JSON object"),
        ('{"architectures": ["LlamaForCausalLM"]}', "missing required field `vocab_size`"),
    ],
)
def test_unusable_config_files(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"architectures": ["FalconMamba"]}, UnknownArchitectureError, "FalconMamba is not supp"),
        ({"architectures": []}, UnknownArchitectureError, r"\(none given\).*MistralForCausalLM"),
        ({"hidden_act": "gelu"}, UnknownArchitectureError, "hidden_act 'gelu'.*supported: silu"),
        ({"num_key_value_heads": 3}, UnknownArchitectureError, "4 query heads over 3 KV heads"),
        ({"num_hidden_layers": 0}, ModelFileError, r">= 1 - at `\$\.num_hidden_layers`"),
        ({"num_hidden_layers": 10**9}, ModelFileError, r"<= 10000 - at `\$\.num_hidden_layers`"),
        ({"head_dim": 15}, UnknownArchitectureError, "head size 15 is not supported"),
        ({"hidden_size": "many"}, ModelFileError, "Expected `int`, got `str`"),
    ],
)
def test_configurations_that_cannot_be_served(
    folder: Path, changes: dict[str, Any], kind: type[ModelError], message: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(kind, match=message):
        load(folder)


def test_model_too_large_says_how_much_is_needed_and_reads_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(WeightReader, "matrix", refuse)
    monkeypatch.setattr(loader, "available_memory", lambda: 2**20)
    edit_config(folder, vocab_size=100_000)
    edit_tensors(
        folder,
        **{
            "model.embed_tokens.weight": torch.zeros(100_000, 64),
            "lm_head.weight": torch.zeros(100_000, 64),
        },
    )
    expected = r"needs 0\.02 GiB for weights in bfloat16 and 64 positions; 0\.00 GiB are available"
    with pytest.raises(ModelTooLargeError, match=expected):
        load(folder, dtype="bfloat16")


def test_devices_that_are_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device 'tpu-9' is unknown"):
        load(folder, device="tpu-9")
    with pytest.raises(ConfigError, match="device 'meta' is not supported; supported: cpu, cuda:N"):
        load(folder, device="meta")
    with pytest.raises(ConfigError, match="'cuda:99' is not there; CUDA devices present"):
        load(folder, device="cuda:99")
