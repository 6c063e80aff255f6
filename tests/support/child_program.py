"""A stand-in for a worker's ``main``: what it does is in the model path of its configuration.

``wait``: until SIGTERM, then exit 0. ``stubborn``: ignores SIGTERM. ``fail``: logs a problem and
exits with 2. ``crash``: exits with 1 at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-json", type=Path, required=True)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--instance-id")
    parser.add_argument("--role")
    options = parser.parse_args()
    behaviour = json.loads(options.config_json.read_text())["model"]["path"]
    facts = {
        "args": sys.argv[1:],
        "cpus": sorted(os.sched_getaffinity(0)),
        "sid": os.getsid(0),
        "omp": os.environ["OMP_NUM_THREADS"],
    }
    if behaviour == "fail":
        print("2026-01-01 [error    ] cannot start   code=model_file problem='there is no model'")
        sys.exit(2)
    if behaviour == "crash":
        sys.exit(1)
    action = signal.SIG_IGN if behaviour == "stubborn" else lambda *_: sys.exit(0)
    signal.signal(signal.SIGTERM, action)
    print(json.dumps(facts), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
