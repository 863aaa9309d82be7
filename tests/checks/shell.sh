#!/bin/sh
# The scripts pass shellcheck.
set -eu
cd "$(dirname "$0")/../.."
command -v shellcheck >/dev/null || exit 77
find .ci packaging tests \( -name '*.sh' -o -path .ci/run \) -print0 | xargs -0 shellcheck
