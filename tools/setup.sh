#!/usr/bin/env bash
# Makes .venv: an interpreter of 3.10 to 3.13, torch for this machine, everything in deps/requirements_dev.txt, and
# the project itself, editable.  Needs a package index and nothing else.
#
#   PYTHON=python3.12      the interpreter, instead of the one found
#   TORCH_INDEX=https://…  the index for torch, instead of the one chosen: PyTorch's own for another CUDA, or for ROCm,
#                          which is never chosen by itself
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
lock=deps/requirements_dev.txt
cpu_index=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*" >&2; }
die() {
    say "$@"
    exit 1
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# The machine's own python3 comes first: it is the one that people set up, with headers and wheels at hand.  After
# that the versions by how many packages have wheels for them.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13 python3.10}; do
        if supported "$candidate" && has_venv "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_venv_module() {
    if [ -z "${PYTHON:-}" ] && supported python3 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "python3 lacks its venv module; installing python3-venv"
        apt-get update -qq >&2 && apt-get install -y -qq python3-venv >&2
    fi
}

no_python() {
    local python=${PYTHON:-python3}
    if supported "$python"; then
        die "$python lacks the modules venv and ensurepip; on Debian or Ubuntu: sudo apt-get install $(basename "$python")-venv"
    fi
    die "no Python 3.10 to 3.13 found ($python: $("$python" --version 2>&1 | head -n 1)); install one, or name it: make setup PYTHON=/path/to/python3.12"
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Five seconds tell a machine that cannot reach an index from a slow one; without the answer, torch comes from pip's
# ordinary index, which is right as well, only larger.
answers() {
    "$venv/bin/python" - "$1/torch/" <<'PYTHON' 2>/dev/null
import sys, urllib.request

urllib.request.urlopen(sys.argv[1], timeout=5).close()
PYTHON
}

install_torch() {
    local pin index=${TORCH_INDEX:-}
    pin=$(grep -E '^torch==' "$lock")
    if "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '${pin#torch==}')" 2>/dev/null; then
        return
    fi
    if [ -z "$index" ] && [ "$(uname -s)" = Linux ] && ! has_gpu && answers "$cpu_index"; then
        index=$cpu_index
    fi
    say "installing $pin from ${index:-the ordinary package index}"
    if [ -n "$index" ]; then
        "$venv/bin/python" -m pip install -qq --index-url "$index" "$pin"
    else
        "$venv/bin/python" -m pip install -qq "$pin"
    fi
}

main() {
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    if ! supported "$venv/bin/python"; then
        local python
        python=$(find_python) || { install_venv_module && python=$(find_python); } || no_python
        say "creating $venv with $("$python" --version) ($python)"
        "$python" -m venv --clear "$venv"
    fi
    install_torch
    say "installing $lock and the project"
    # Without dependencies: the file is complete, and deps/dev.uv.toml says whose requirements are cut down on purpose.
    "$venv/bin/python" -m pip install -qq --no-deps -r "$lock"
    "$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation -e .
    "$venv/bin/python" -c 'import torch; print("setup: ready, torch", torch.__version__)' >&2
}

main
