#!/usr/bin/env bash
# Formats Bazel files, or with --check only says what is not formatted or lints badly.  buildifier comes from npm, its
# version and digest from tools/buildifier/package-lock.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

home=.cache/buildifier
binary=$home/node_modules/.bin/buildifier
if ! cmp -s tools/buildifier/package-lock.json "$home/package-lock.json" || [[ ! -e $binary ]]; then
    if ! command -v npm >/dev/null; then
        echo "buildifier: SKIPPED, Bazel files were not linted: no npm here" >&2
        # A developer may go without; CI may not.
        [[ -z ${CI:-} ]] || exit 1
        exit 0
    fi
    mkdir -p "$home"
    cp tools/buildifier/package.json tools/buildifier/package-lock.json "$home/"
    npm ci --prefix "$home" --silent
fi

mapfile -t files < <(git ls-files --cached --others --exclude-standard -- '*.bzl' '*BUILD.bazel' '*MODULE.bazel' WORKSPACE)
# The shims are native rules by their nature, and a macro that makes a whole folder's targets names them itself.
warnings=-module-docstring,-function-docstring,-unnamed-macro,-native-py
for rule in binary test library import toolchain toolchain-suite proto fdo-prefetch-hints fdo-profile objc-library objc-import; do
    warnings+=,-native-cc-$rule
done
if [[ ${1:-} == --check ]]; then
    exec "$binary" --mode=check --lint=warn --warnings="$warnings" "${files[@]}"
fi
exec "$binary" --mode=fix "${files[@]}"
