#!/usr/bin/env bash
# Makes a virtual environment with transformers and what its small server needs.
# usage: transformers_setup.sh VENV
set -euo pipefail
venv=${1:?usage: transformers_setup.sh VENV}
python=${PYTHON:-python3}
version=5.23.0
[ -f "$venv/.ready-$version" ] && exit 0
"$python" -m venv "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check \
  "transformers==$version" torch==2.13.0 accelerate safetensors fastapi uvicorn psutil
touch "$venv/.ready-$version"
