#!/bin/bash
# What is installed works where it was installed: README's C program, built as README says, reads a whole answer.
# usage: install.sh BUILD_DIRECTORY
set -euo pipefail
readme=$(cd "$(dirname "$0")/../.." && pwd)/README.md
dir=$(mktemp -d)
export GCOALESCE_RUNTIME_DIR=$dir/run GCOALESCE_INSTANCE=install-$$
pids=()
clean_up() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$dir" "/dev/shm/gcoalesce-$(id -u)-$GCOALESCE_INSTANCE-"*
}
trap clean_up EXIT

cmake --install "$1" --prefix "$dir/built" >/dev/null
mv "$dir/built" "$dir/usr" # as a package does: what it installs knows no prefix
PKG_CONFIG_PATH=$(dirname "$(find "$dir/usr" -name gcoalesce.pc)")
export PKG_CONFIG_PATH
awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } inside' "$readme" >"$dir/example.c"
read -ra flags <<<"$(pkg-config --cflags --libs gcoalesce)"
gcc -std=c11 -Wall -Wextra -Wpedantic -Werror "$dir/example.c" "${flags[@]}" -o "$dir/example"

exec 3< <(exec "$dir/usr/bin/gcoalesce" sim --events 12)
pids+=($!)
read -r _ _ url <&3 # "listening on URL"
GEMINI_API_KEY=any "$dir/usr/sbin/gcoalesced" --upstream "$url" --memory 8MiB --streams 64 --log-level error &
pids+=($!)
until "$dir/usr/bin/gcoalesce" notify status >/dev/null 2>&1; do
    kill -0 "${pids[-1]}"
    sleep 0.05
done
LD_LIBRARY_PATH=$(pkg-config --variable=libdir gcoalesce) "$dir/example" >"$dir/answer"
[ "$(wc -l <"$dir/answer")" -eq 12 ]
tail -n 1 "$dir/answer" | grep -q '"finishReason": "STOP"'
