#!/bin/bash
# Installs the packages in a container that systemd boots, and proves there what inside.sh says.
# usage: run.sh [DIRECTORY]   with packages that packaging/build-deb.sh has made (default: makes them in build/deb)
# Exit status 77, and why, where no container can be booted. Needs root, and a repository of Debian's.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/packaging
skip() {
    echo "SKIPPED: packages in a container: $*"
    exit 77
}
[ "$(id -u)" -eq 0 ] || skip "that needs root"
packaging/deps.sh container deb

debs=${1:-build/deb}
[ $# -gt 0 ] || packaging/build-deb.sh "$debs"
debs=$(cd "$debs" && pwd)
say() { printf '== %s (%d s)\n' "$*" "$SECONDS"; }

say lintian
lintian --allow-root --fail-on error,warning "$debs"/*.changes

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 1' HUP INT TERM
root=$work/root

# With all that the packages depend on: the container has no network. Kept beside the packages for the next run.
say "a Debian to install them on"
depends=systemd,systemd-sysv,dbus,libpam-systemd,procps,curl
depends+=,$(for deb in "$debs"/gcoalesce_*.deb "$debs"/gcoalesced_*.deb; do dpkg-deb -f "$deb" Depends; done |
    sed 's/([^)]*)//g; s/|[^,]*//g; s/,/\n/g' | awk '{print $1}' | grep -vE '^gcoalesce' | sort -u | paste -s -d ,)
base=build/container-$(echo "$depends" | sha256sum | cut -c 1-12).tar
if [ ! -e "$base" ]; then
    mkdir -p build
    # From where this machine has its own packages.
    # shellcheck disable=SC2016 # apt's variables
    sources() {
        apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian'
    }
    [ -n "$(sources)" ] || apt-get -qq update
    sources |
        mmdebstrap --quiet --variant=minbase \
            --include="$depends" bookworm "$work/base.tar" - ||
        skip "mmdebstrap found no Debian to make it of"
    mv "$work/base.tar" "$base"
fi
mkdir "$root"
tar -xf "$base" -C "$root" || skip "that system cannot be unpacked here"

place=$root/srv/gcoalesce
mkdir -p "$place/build/deb" "$place/build/deb.next" "$work/next"
cp "$debs"/Packages "$place/build/deb"
for deb in "$debs"/*.deb; do
    case $deb in *-dbgsym_*) continue ;; esac
    cp "$deb" "$place/build/deb"
    # The same package as the next revision, for the upgrade.
    version=$(dpkg-deb -f "$deb" Version)
    rm -rf "$work/next"
    dpkg-deb -R "$deb" "$work/next"
    sed -i "s/\b${version//./\\.}\b/${version%-*}-2/" "$work/next/DEBIAN/control"
    dpkg-deb -Zgzip -z1 --root-owner-group -b "$work/next" "$place/build/deb.next" >/dev/null
done
(cd "$place/build/deb.next" && dpkg-scanpackages . >Packages 2>/dev/null)

cp $here/inside.sh "$place/"
awk '/^## /{ inside = /^## Install as a service/ } !inside { next } /^```/ { code = /^```sh/; next } code' README.md |
    grep -vx 'packaging/build-deb.sh' >"$place/readme-commands"
[ -s "$place/readme-commands" ]
cat >"$root/etc/systemd/system/inside.service" <<'UNIT'
[Unit]
After=basic.target systemd-user-sessions.service
Requires=dbus.socket
SuccessAction=exit
FailureAction=exit
FailureActionExitStatus=3
[Service]
Type=oneshot
ExecStart=/srv/gcoalesce/inside.sh
StandardOutput=append:/srv/gcoalesce/log
StandardError=inherit
TimeoutStartSec=1200
UNIT
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../inside.service "$root/etc/systemd/system/multi-user.target.wants/"

boot() {
    local status=0
    timeout -s KILL 1300 systemd-nspawn -q -D "$root" --boot --register=no --keep-unit --console=pipe \
        --private-network --hostname=gcoalesce-test >"$work/console" 2>&1 </dev/null || status=$?
    [ -e "$place/log" ] || {
        cat "$work/console" >&2
        skip "systemd-nspawn could not boot one here"
    }
    cat "$place/log"
    ! grep -q '^SKIPPED: ' "$place/log" || exit 77
    return $status
}
say "first boot"
boot
: >"$place/log"
say "second boot"
boot
say "what was expected"
