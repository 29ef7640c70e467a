#!/usr/bin/env bash
# What the Bazel 7 lane runs, inside the root: every tag of MODULE.bazel, wheels of two platforms, their metadata
# tests, and a pytest target.  The wheels' digests go to the file named first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
digests=$1
trap 'tools/bazel shutdown >/dev/null 2>&1 || true' EXIT

python3 bazel/compat/bazel7/overlay.py /usr/share/bazel/rules/python /opt/rtp/rules_python
# Evaluates every extension, so every tag; query and build evaluate only what they need.
tools/bazel mod graph >/dev/null
tools/bazel query //... >/dev/null
: >"$digests"
for platform in cpu cuda13_arm; do
    tools/bazel build --config=$platform //:wheel
    wheel=$(tools/bazel cquery --config=$platform //:wheel --output=files 2>/dev/null)
    (cd "$(dirname "$wheel")" && sha256sum "$(basename "$wheel")") >>"$digests"
done
tools/bazel test --config=cuda13_arm //tests/wheel:test_metadata_cpu //tests/wheel:test_metadata_cuda13_arm //tests/arch_config:test_table
