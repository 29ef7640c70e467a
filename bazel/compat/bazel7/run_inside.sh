#!/usr/bin/env bash
# run_inside.sh ROOT WORKSPACE COMMAND...: runs a command in the root, with the workspace at its own path.  The mounts
# end with the command; a Bazel server left behind would hold them, so the command shuts it down.
set -euo pipefail
root=$1
workspace=$2
shift 2

exec unshare -m --propagation private bash -euc '
    root=$1
    workspace=$2
    shift 2
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/tmp"
    mkdir -p "$root$workspace"
    mount --bind "$workspace" "$root$workspace"
    exec chroot "$root" env -i HOME=/root USER=root LANG=C.UTF-8 PATH=/opt/py311/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        bash -c "cd \"\$1\"; shift; exec \"\$@\"" _ "$workspace" "$@"
' _ "$root" "$workspace" "$@"
