"""Says which kernels engines would use: for a program that does not load torch itself.

``python -m isthmus.kernels.report '[{"device": "cpu", "num_threads": 1, "kernels": {}}]'`` writes a
JSON list of ``{device, description, ops: [{op, implementation, reason}]}`` to standard output, with
one entry for each engine and, where there is a GPU that none of them uses, one for that.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from isthmus.common.errors import ConfigError
from isthmus.kernels.registry import select


def report(engines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises ConfigError for kernels that are not to be had."""
    if torch.cuda.is_available() and not any(e["device"].startswith("cuda") for e in engines):
        engines = [*engines, {"device": "cuda", "num_threads": 1, "kernels": {}}]
    listed = []
    for engine in engines:
        device = engine["device"]
        kernels = select(device, engine["num_threads"], overrides=engine["kernels"])
        ops = [asdict(choice) for choice in kernels.choices]
        listed.append({"device": device, "description": kernels.describe(), "ops": ops})
    return listed


def main() -> None:
    try:
        listed = report(json.loads(sys.argv[1]))
    except ConfigError as error:
        sys.exit(error.message)
    sys.stdout.write(json.dumps(listed) + "\n")


if __name__ == "__main__":
    main()
