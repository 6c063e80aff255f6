#!/usr/bin/env bash
# Makes a virtual environment for each peer of the frontends benchmark, apart from our own.
# usage: setup.sh FOLDER
set -euo pipefail
folder=${1:?usage: setup.sh FOLDER}
python=${PYTHON:-python3}
mkdir -p "$folder"

# NAME, then one line of pip's arguments after the other; does nothing where it is ready.
environment() {
    local venv="$folder/$1"
    shift
    [ -f "$venv/.ready" ] && return
    "$python" -m venv "$venv"
    local words
    for words in "$@"; do
        # shellcheck disable=SC2086 (a line is several arguments)
        "$venv/bin/pip" install -q --disable-pip-version-check $words
    done
    touch "$venv/.ready"
}

environment front-sglang sglang-router==0.3.2
environment front-vllm vllm-router==0.1.17
# As one package it does not resolve.
environment front-dynamo ai-dynamo-runtime==1.6.1 "--no-deps ai-dynamo==1.6.1" \
    "kubernetes<33,>=32.0.1 msgspec prometheus-client pyzmq redis<9,>=6.2 tqdm zstandard aiohttp" \
    "transformers==5.23.0 certifi"
