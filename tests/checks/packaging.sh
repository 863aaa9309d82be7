#!/bin/sh
# What packages say twice they say alike: versions, build dependencies, options and their defaults. The example template
# is well.
# usage: packaging.sh GCOALESCED GCOALESCE CONFIGURATION
set -eu
export LC_ALL=C
cd "$(dirname "$0")/../.."
gcoalesced=$1 gcoalesce=$2 configuration=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
broken=0

# same WHAT: $dir/one and $dir/two are.
same() {
    if ! diff -u "$dir/one" "$dir/two"; then
        echo "$1" >&2
        broken=1
    fi
}

# The distribution's own, and what only a tree that is built again and again wants, aside.
packaging/deps.sh -n build | tr ' ' '\n' | grep -vxE 'ca-certificates|ccache|g\+\+' | sort >"$dir/one"
sed -nE '/^Build-Depends:/,/^[A-Z]/ s/^ ([^ ,]+).*/\1/p' packaging/debian/control |
    grep -vxE 'debhelper-compat|dh-sequence-.*' | sort >"$dir/two"
same "packaging/deps.sh and packaging/debian/control differ in what a build needs"

sed -nE 's/^project\(gcoalesce VERSION ([0-9.]+).*/\1/p' CMakeLists.txt >"$dir/one"
sed -nE '1 s/^gcoalesce \(([0-9.]+)-.*/\1/p' packaging/debian/changelog >"$dir/two"
same "CMakeLists.txt and packaging/debian/changelog differ in the version"

# The file sets the directory of templates, and no other option.
grep -E '^[^#]' "$configuration" | sed 's/ =.*//' >"$dir/one"
echo templates >"$dir/two"
same "$configuration sets something else than templates"
"$gcoalesced" --help | sed -nE 's/^  --([a-z-]+) ([^=(]*)(=(.*))? \(Env:.*$/\1 = \4/p' |
    sed -E 's/\.0([A-Za-z])/\1/' | sort >"$dir/one"
sed -nE 's/^#?([a-z-]+) = "?([^"]*)"?$/\1 = \2/p' "$configuration" | sed -E 's/^templates = .*/templates = /' |
    sort >"$dir/two"
same "gcoalesced --help and $configuration differ in options or defaults"

# The gateway's file names variables that are taken, and the default that `serve` tells.
sed -nE 's/^#(GCOALESCE_[A-Z_]+)=.*/\1/p' packaging/etc/gateway | sort >"$dir/one"
{
    "$gcoalesce" serve --help
    "$gcoalesce" --help
    cat packaging/systemd/gcoalesce-gateway.service.in
} | grep -oE '\<GCOALESCE_[A-Z_]+' | sort -u | comm -12 - "$dir/one" >"$dir/two"
same "packaging/etc/gateway names a variable that nobody reads"
listen=$(sed -n 's/^#GCOALESCE_LISTEN=//p' packaging/etc/gateway)
"$gcoalesce" serve --help | grep -qF "(default $listen)" || {
    echo "packaging/etc/gateway tells another default of GCOALESCE_LISTEN than gcoalesce serve --help" >&2
    broken=1
}

# All of its lines are taken: the broker goes as far as a directory that nobody can make. "" is no group.
mkdir "$dir/templates"
sed -E '/^#admin-group/d; s/^#([a-z-]+ = )/\1/; s#^templates = .*#templates = "'"$dir/templates"'"#' "$configuration" >"$dir/all"
code=0
"$gcoalesced" --config "$dir/all" --runtime-dir /proc/gcoalesce 2>"$dir/why" || code=$?
if [ "$code" -ne 1 ] || ! grep -q 'cannot make the runtime directory /proc/gcoalesce' "$dir/why"; then
    cat "$dir/why" >&2
    broken=1
fi

for example in packaging/etc/templates.d/*.json.example; do
    cp "$example" "$dir/templates/$(basename "$example" .example)"
done
"$gcoalesce" templates check "$dir/templates" >"$dir/why" 2>&1 || {
    cat "$dir/why" >&2
    broken=1
}
exit $broken
