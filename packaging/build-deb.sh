#!/bin/sh
# Makes DIRECTORY a repository for apt: the Debian packages of what is committed (of all files, where this is no clone),
# and the source package. On a bare Debian 12 it installs what the build needs, as root or by sudo.
# usage: packaging/build-deb.sh [DIRECTORY]   (default: build/deb; DEB_BUILD_OPTIONS=parallel=N: so many jobs)
set -eu
cd "$(dirname "$0")/.."
packaging/deps.sh build deb

mkdir -p "${1:-build/deb}"
out=$(cd "${1:-build/deb}" && pwd)
changelog() { dpkg-parsechangelog -l packaging/debian/changelog -S "$1"; }
version=$(changelog Version)
upstream=${version%-*}
SOURCE_DATE_EPOCH=$(changelog Timestamp)
export SOURCE_DATE_EPOCH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
tree=$work/gcoalesce-$upstream
mkdir "$tree"
if git rev-parse -q --verify HEAD >/dev/null 2>&1; then
    git archive HEAD | tar -x -C "$tree"
else
    tar -c --exclude=./build --exclude=./.git . | tar -x -C "$tree"
fi
# Not in the archive of the sources: Debian's own part, which dpkg-source wants to find in debian/.
mv "$tree/packaging/debian" "$tree/debian"
tar -c -C "$work" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
    --exclude="gcoalesce-$upstream/debian" "gcoalesce-$upstream" |
    gzip -9n >"$work/gcoalesce_$upstream.orig.tar.gz"
# The same packages on every machine: a cache that knows the files by relative names writes those into what it keeps.
export CCACHE_DISABLE=1
(cd "$tree" && dpkg-buildpackage -us -uc)
rm -f "$out"/*gcoalesce*_* # of an earlier version
find "$work" -maxdepth 1 -type f -exec mv -t "$out" {} +
(cd "$out" && dpkg-scanpackages . >Packages)
