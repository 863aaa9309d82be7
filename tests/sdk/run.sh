#!/bin/bash
# Real client SDKs read through a gateway. Their packages come from npm into the build directory; without npm, or
# without its registry, this is skipped. Debian 12's Node 18 runs them all, though @google/genai names 20 as its least.
# usage: run.sh BUILD_DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
if ! command -v npm >/dev/null; then
    echo "SKIPPED: npm is not installed"
    exit 77
fi
mkdir -p "$build/sdk"
cp "$here/package.json" "$here/clients.mjs" "$build/sdk"
if ! (cd "$build/sdk" && npm install --no-package-lock --no-audit --no-fund --loglevel=error --fetch-retries=1 \
    --prefer-offline); then
    echo "SKIPPED: npm's registry does not give the packages"
    exit 77
fi

dir=$(mktemp -d)
export GCOALESCE_RUNTIME_DIR=$dir/run GCOALESCE_INSTANCE=sdk-$$
pids=()
clean_up() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$dir" "/dev/shm/gcoalesce-$(id -u)-$GCOALESCE_INSTANCE-"*
}
trap clean_up EXIT

exec 3< <(exec "$build/cli/gcoalesce" sim --replay "$here/answers")
pids+=($!)
read -r _ _ sim <&3 # "listening on URL"
"$build/broker/gcoalesced" --upstream "$sim" --memory 16MiB --ttl-idle 10min --retries 0 --log-level error &
pids+=($!)
exec 4< <(exec "$build/cli/gcoalesce" serve --listen 127.0.0.1:0 2>"$dir/log")
pids+=($!)
read -r _ _ gateway <&4
until "$build/cli/gcoalesce" notify status >/dev/null 2>&1; do
    kill -0 "${pids[1]}"
    sleep 0.05
done
node "$build/sdk/clients.mjs" "$gateway" "$sim" || {
    cat "$dir/log"
    exit 1
}
