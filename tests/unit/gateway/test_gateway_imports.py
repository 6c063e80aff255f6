"""The gateway runs on machines that have none of the engine's libraries."""

from __future__ import annotations

import subprocess
import sys


def test_the_gateway_starts_without_torch_ray_nixl_and_transformers() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'ray', 'nixl_cu13', 'nixl', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import isthmus.gateway.main\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
