"""Which implementation computes which op, and how an operator changes it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from isthmus.common.config import ModelConfig
from isthmus.common.errors import ConfigError
from isthmus.engine.models.loader import load_model
from isthmus.kernels import Kernels, reference, registry, select
from isthmus.kernels.cpu import BuildError
from isthmus.kernels.registry import OPS, SelectedKernels
from tests.support.tiny_models import save, tiny_model


def implementations(kernels: SelectedKernels) -> dict[str, str]:
    return {choice.op: choice.implementation for choice in kernels.choices}


def test_every_op_of_the_contract_is_chosen_and_has_a_reference() -> None:
    contract = {name for name in vars(Kernels) if not name.startswith("_")} - {"describe"}
    assert set(OPS) == contract == set(reference.OPS)
    assert set(implementations(select("cpu"))) == contract


def test_equal_arguments_give_the_same_kernels() -> None:
    first = select("cpu", 1, overrides={"silu_mul": "reference"})
    assert select("cpu", 1, overrides={"silu_mul": "reference"}) is first
    assert select("cpu", 1) is not first


def test_what_was_chosen_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        select("cpu").linear = reference.linear  # type: ignore[misc]


def test_on_the_cpu_compiled_ops_come_first_and_the_reference_fills_in() -> None:
    chosen = implementations(select("cpu"))
    assert chosen["linear"] == chosen["pack_linear"] == chosen["paged_attention"] == "cpu"
    assert chosen["draw_tokens"] == "reference"
    assert select("cpu").describe().startswith("cpu (")


def test_an_override_moves_its_op_alone_and_says_so() -> None:
    kernels = select("cpu", 1, overrides={"rms_norm": "reference"})
    moved = [choice.op for choice in kernels.choices if choice.reason == "overridden"]
    assert moved == ["rms_norm"]
    assert kernels.rms_norm is reference.rms_norm


def test_packed_weights_and_their_product_move_together() -> None:
    kernels = select("cpu", 1, overrides={"linear": "reference"})
    assert kernels.pack_linear is reference.pack_linear
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    torch.testing.assert_close(kernels.linear(x, kernels.pack_linear(weight)), x @ weight.T)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_nrm": "cpu"}, "unknown op 'rms_nrm'; did you mean 'rms_norm'"),
        ({"zzz": "cpu"}, "unknown op 'zzz'; known: pack_linear, linear"),
        ({"rms_norm": "refrence"}, "'refrence'; did you mean 'reference'"),
        ({"pack_linear": "reference"}, "pack_linear follows linear"),
        ({"draw_tokens": "cpu"}, "cpu has no draw_tokens; it has pack_linear"),
    ],
)
def test_an_override_that_means_nothing_is_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        select("cpu", 1, overrides=overrides)
    assert caught.value.param == f"engine.kernels.{next(iter(overrides))}"


def test_kernels_of_another_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not run on cuda"):
        select("cuda", 1, overrides={"rms_norm": "cpu"})
    with pytest.raises(BuildError, match="do not run on cuda"):
        select("cuda", 1, "cpu")
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="need a GPU"):
        select("cpu", 1, overrides={"rms_norm": "triton"})


def test_a_gpu_takes_triton_and_the_products_of_torch() -> None:
    pytest.importorskip("triton")
    kernels = select("cuda:1")
    chosen = implementations(kernels)
    assert chosen["linear"] == chosen["pack_linear"] == "reference"
    assert {name for op, name in chosen.items() if "linear" not in op} == {"triton"}
    assert kernels.describe().startswith("triton (")
    assert kernels.describe().endswith("2 ops of reference")


def test_without_triton_a_gpu_takes_the_reference_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_select", registry._select.__wrapped__)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    kernels = select("cuda")
    assert {choice.implementation for choice in kernels.choices} == {"reference"}
    assert all("not installed" in choice.reason for choice in kernels.choices)


def test_a_model_is_loaded_with_the_kernels_of_its_configuration(tmp_path: Path) -> None:
    folder = ModelConfig(path=str(save(tiny_model("llama"), tmp_path / "tiny")))
    with pytest.raises(ConfigError, match="did you mean 'silu_mul'"):
        load_model(folder, "cpu", 1, kernels_by_op={"silu_mull": "reference"})
    assert load_model(folder, "cpu", 1, kernels_by_op=dict.fromkeys(OPS[1:], "reference"))
