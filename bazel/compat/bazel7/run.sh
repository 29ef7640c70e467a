#!/usr/bin/env bash
# make bazel7: MODULE.bazel on Debian's Bazel 7.7, and its wheels against Bazel 4's, byte for byte.
# RTP_BAZEL7_ROOT: where the root lies (default /var/cache/rtp-bazel7).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
here=bazel/compat/bazel7
root=${RTP_BAZEL7_ROOT:-/var/cache/rtp-bazel7}

skip() {
    echo "================================================================" >&2
    echo "bazel7: LANE SKIPPED, MODULE.bazel was not run: $*" >&2
    echo "================================================================" >&2
    exit 0
}

[[ $(id -u) = 0 ]] || skip "it needs root, for debootstrap and chroot"
command -v debootstrap >/dev/null || { apt-get update -qq && apt-get install -qqy debootstrap >/dev/null; } || skip "no debootstrap"
unshare -m true 2>/dev/null || skip "this machine allows no mount namespaces"
mkdir -p "$(dirname "$root")"
$here/make_root.sh "$root" || skip "the root cannot be built, see $root.log"

digests=.bazel7-wheels
trap 'rm -f "$digests"' EXIT
$here/run_inside.sh "$root" "$PWD" $here/lane.sh "$digests"

status=0
for platform in cpu cuda13_arm; do
    tools/bazel build --config=$platform //:wheel
    wheel=$(tools/bazel cquery --config=$platform //:wheel --output=starlark --starlark:expr='target.files.to_list()[0].path' 2>/dev/null)
    line=$(cd "$(dirname "$wheel")" && sha256sum "$(basename "$wheel")")
    if grep -qxF "$line" "$digests"; then
        echo "bazel7: the same bytes from both Bazels: $(basename "$wheel")"
    else
        echo "bazel7: different wheels: here $line, from Bazel 7: $(cat "$digests")" >&2
        status=1
    fi
done
exit $status
