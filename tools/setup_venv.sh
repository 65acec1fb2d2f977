#!/usr/bin/env bash
# Make or refresh the project's virtual environment: tools/setup_venv.sh VENV EXTRAS
# Works on a bare machine: asks apt for Python, its venv and a C++ compiler, where it may.
set -euo pipefail

venv=$1
extras=$2
python=${PYTHON:-python3}

note() { echo "set-up: $*" >&2; }

apt_install() {
    command -v apt-get >/dev/null || return 1
    local sudo=""
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null || return 1
        sudo="sudo -n"
    fi
    note "apt-get install $*"
    local said
    said=$( { $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@"; } 2>&1 ) || { echo "$said" >&2; return 1; }
}

good_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

find_python() {
    for candidate in "$python" python3.11 python3.12 python3; do
        if good_python "$candidate"; then python=$candidate; return; fi
    done
    return 1
}

if ! find_python && ! { apt_install python3 python3-venv && find_python; }; then
    note "Python 3.11 or 3.12 is needed (PYTHON=... names one); '$python' is not"
    exit 2
fi

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        apt_install "python$version-venv" || apt_install python3-venv || true
        "$python" -m venv "$venv"
    fi
fi
# torch compiles its CPU kernels with it; without one the engine runs them uncompiled.
if ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
    apt_install g++ || note "no C++ compiler: going on without"
fi

# What tests need beside Python: a browser for the page, `ip` for machines in network namespaces.
if [[ ",$extras," == *,test,* ]]; then
    command -v chromium chromium-browser google-chrome google-chrome-stable chrome >/dev/null ||
        apt_install chromium || note "no browser: the tests of the page will be skipped"
    command -v redis-server >/dev/null || command -v valkey-server >/dev/null ||
        apt_install redis-server || note "no Redis: the tests of remote pages will be skipped"
    command -v ip >/dev/null || apt_install iproute2 ||
        note "no iproute2: tests of several machines will be skipped"
fi

# By its earlier name the project would be there twice, and to remove that later would take `actorium`
# off the path.
"$venv/bin/python" -m pip --disable-pip-version-check uninstall --quiet --quiet --yes actorium
note "installing into $venv; once, and some minutes without a package cache"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet)
# The versions that the tests ran with; elsewhere (another system, another Python) any in range.
if ! "${pip[@]}" -c constraints.txt torch || ! "${pip[@]}" -c constraints.txt -e ".[$extras]"; then
    note "constraints.txt does not fit here: taking the newest versions in range"
    "${pip[@]}" "torch>=2.11,<2.14"
    "${pip[@]}" -e ".[$extras]"
fi
# The C kernels of the CPU path: built now, so that the first engine does not wait for them.
"$venv/bin/python" -c 'import torch
from actorium.kernels.cpu.native_library import library
print("set-up: C kernels", "built" if library() else "not available: torch kernels serve")' >&2
