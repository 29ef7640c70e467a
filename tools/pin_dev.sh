#!/usr/bin/env bash
# Writes deps/requirements_dev.txt: exact versions for the development environment, one file for Python 3.10 to 3.13.
# Needs uv (pip install uv).  Run it after a change in deps/requirements.in or deps/dev.in.
set -euo pipefail
cd "$(dirname "$0")/.."

out=deps/requirements_dev.txt
{
    echo "# Exact versions for make setup.  Written by tools/pin_dev.sh from requirements.in and dev.in; do not edit."
    # What only torch's CUDA build needs is left out: its metadata pins every one of them, and a CPU build has none.
    uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --config-file deps/dev.uv.toml \
        deps/requirements.in deps/dev.in |
        grep -vE '^(nvidia-(cu|nccl|nv)|cuda-|triton==)'
} >"$out.new"
mv "$out.new" "$out"
