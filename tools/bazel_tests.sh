#!/usr/bin/env bash
# make test's Bazel part: every test once in this machine's CPU lane, then every other platform's lane, in which all
# that can run here is the same and cached, and the rest is skipped by name.  Ends with a closing line like pytest's.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
tools/get_bazel.sh || exit 1

lane=cpu
[[ $(uname -m) != aarch64 ]] || lane=cpu_arm
options=(--noshow_progress --keep_going --test_output=errors)
started=$(date +%s)

log=$(mktemp)
trap 'rm -f "$log"' EXIT
tools/bazel test --config=$lane "${options[@]}" //:ci_cpu "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

for other in $(sed -n 's/^build:\([a-z0-9_]*\) .*/\1/p' arch_config/platforms.bazelrc); do
    [[ $other != "$lane" ]] || continue
    echo "== lane $other"
    # What cannot run here is SKIPPED; 4 says that there was nothing to run, and there always is.
    tools/bazel test --config="$other" "${options[@]}" --test_summary=terse //tests/... || status=1
done

# A target of another lane is SKIPPED and leaves no result.
labels=$(tools/bazel query --noshow_progress 'tests(//:ci_cpu)' 2>/dev/null | grep -vxFf <(awk '$NF == "SKIPPED" {print $1}' "$log"))
# shellcheck disable=SC2086 # labels are words
python3 tools/count_tests.py "$(tools/bazel info --config=$lane bazel-testlogs 2>/dev/null)" "$(($(date +%s) - started))" $labels || status=1
exit $status
