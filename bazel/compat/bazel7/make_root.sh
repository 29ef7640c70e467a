#!/usr/bin/env bash
# make_root.sh ROOT [SUITE]: a folder with Debian's Bazel 7.7, its rule sets and Python 3.11 (about 1.6 GB, a minute).
set -euo pipefail

root=$1
suite=${2:-forky}
done_mark=$root/.rtp-done
[[ ! -e $done_mark ]] || exit 0

mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources)
rm -rf "$root"
debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" "$mirror" /usr/share/debootstrap/scripts/sid >"$root.log" 2>&1 || {
    tail -20 "$root.log" >&2
    exit 1
}
cp /etc/resolv.conf "$root/etc/"
[[ ! -e /etc/pip.conf ]] || cp /etc/pip.conf "$root/etc/"
cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod +x "$root/usr/sbin/policy-rc.d"

# A mirror may lag behind its Release file's Valid-Until; signatures are still checked.
cat >"$root/etc/apt/apt.conf.d/99rtp" <<'APT'
Acquire::Check-Valid-Until "false";
APT::Install-Recommends "false";
Dpkg::Options:: "--path-exclude=/usr/share/{doc,man,locale}/*";
APT
# Python 3.11, which lane cpu's lock is for, is bookworm's.
echo "deb $mirror bookworm main" >"$root/etc/apt/sources.list.d/bookworm.list"
printf 'Package: *\nPin: release n=bookworm\nPin-Priority: 100\n' >"$root/etc/apt/preferences.d/bookworm"

unshare -m --propagation private bash -euc '
    mount -t proc proc "$1/proc"
    mount --rbind /dev "$1/dev"
    inside() { chroot "$1" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "${@:2}"; }
    inside "$1" apt-get -q update
    inside "$1" apt-get -qy install bazel-bootstrap python3-pip python3.11 unzip
    inside "$1" update-ca-certificates
    inside "$1" apt-get clean
' _ "$root" >>"$root.log" 2>&1 || {
    tail -20 "$root.log" >&2
    exit 1
}
mkdir -p "$root/opt/py311/bin"
ln -sf /usr/bin/python3.11 "$root/opt/py311/bin/python3"
touch "$done_mark"
