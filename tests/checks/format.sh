#!/bin/sh
# The sources are as .clang-format has them.
set -eu
cd "$(dirname "$0")/../.."
command -v clang-format >/dev/null || exit 77
find lib broker cli tests \( -name '*.[ch]pp' -o -name '*.[ch]' \) -print0 | xargs -0 clang-format --dry-run -Werror
