#!/bin/sh
# Installs what is missing, builds, and runs every test.
# usage: tests/run.sh [CTEST OPTION]...   e.g. tests/run.sh -R 'coalescer'
set -eu
cd "$(dirname "$0")/.."
packaging/deps.sh build test
packaging/build.sh release -DGCOALESCE_TESTS=ON
exec ctest --preset release --no-tests=error "$@"
