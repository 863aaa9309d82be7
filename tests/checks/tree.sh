#!/bin/sh
# The tree works from any place: no file names a directory of somebody's machine, no script a host of a network.
set -eu
cd "$(dirname "$0")/../.."
broken=0

if grep -rnIE --exclude-dir=.git --exclude=.git --exclude-dir=build '(^|[^[:alnum:]_.$}>)-])/(work|home|root|Users)/' .; then
    echo 'a path of one machine' >&2
    broken=1
fi
if grep -rnIE 'https?://' .ci packaging --include='*.sh' --include=run | grep -vE 'https?://(127\.0\.0\.1|localhost)'; then
    echo 'a script that names a host' >&2
    broken=1
fi
exit $broken
