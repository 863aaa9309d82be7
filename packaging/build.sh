#!/bin/sh
# Configures and builds a preset in build/PRESET, with as many jobs as the cores and the free memory allow.
# usage: packaging/build.sh PRESET [CMAKE OPTION]... [-- TARGET]...
set -eu
cd "$(dirname "$0")/.."

preset=$1
shift
options=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options="$options $1"
    shift
done
[ $# -eq 0 ] || shift

jobs=$(nproc)
# The largest file takes a compiler 1.5 GiB, with sanitizers.
fit=$(awk '/^MemAvailable:/ { print int($2 / 1572864) }' /proc/meminfo)
[ "$fit" -ge "$jobs" ] || jobs=$((fit > 1 ? fit : 1))

# shellcheck disable=SC2086 # options, one a word
cmake --preset "$preset" $options
cmake --build --preset "$preset" -j "$jobs" ${1+--target "$@"}
