#!/usr/bin/env bash
# Sees to a Bazel: bazelisk or Bazel where there is one, else Debian's bazel-bootstrap (4.2.3, ten seconds), with the
# rule sets that WORKSPACE takes from /usr/share/bazel, and pip for the Python that fetches packages.
set -euo pipefail

die() {
    echo "get_bazel: $*" >&2
    exit 1
}

packages=()
if ! command -v bazel >/dev/null && ! command -v bazelisk >/dev/null; then
    packages+=(bazel-bootstrap)
fi
# Debian's Bazel alone reads WORKSPACE; bazelisk's reads MODULE.bazel and brings its own rule sets and Python.
if [[ ${#packages[@]} -gt 0 || -x /usr/bin/bazel-4 ]]; then
    [[ -d /usr/share/bazel/tools/skylib && -d /usr/share/bazel/tools/platforms ]] || packages+=(bazel-skylib bazel-platforms)
    [[ -d /usr/share/bazel/rules/java && -d /usr/share/bazel/rules/proto ]] || packages+=(bazel-rules-java bazel-rules-proto)
    "${RTP_PYTHON:-python3.11}" -m pip --version >/dev/null 2>&1 || packages+=(python3.11 python3-pip python3.11-venv)
fi
[[ ${#packages[@]} -gt 0 ]] || exit 0

command -v apt-get >/dev/null || die "no Bazel here, and no apt-get; install bazelisk"
[[ $(id -u) = 0 ]] || die "as root: apt-get install ${packages[*]}   (or install bazelisk)"
echo "get_bazel: installing ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -q && apt-get install -qy "${packages[@]}"; } >/tmp/get_bazel.log 2>&1 || {
    tail -20 /tmp/get_bazel.log >&2
    die "apt-get failed"
}
