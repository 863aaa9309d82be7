#!/bin/bash
# A page in Chromium reads through a gateway that is killed and comes back. Skipped without node or a working chromium.
# usage: browser.sh BUILD_DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
for program in chromium node; do
    if ! command -v $program >/dev/null; then
        echo "SKIPPED: $program is not installed"
        exit 77
    fi
done
if ! timeout 60 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom about:blank \
    </dev/null >/dev/null 2>&1; then
    echo "SKIPPED: chromium does not start here"
    exit 77
fi

dir=$(mktemp -d)
export GCOALESCE_RUNTIME_DIR=$dir/run GCOALESCE_INSTANCE=browser-$$
pids=()
clean_up() {
    [ ! -e "$dir/gateway.pid" ] || kill "$(cat "$dir/gateway.pid")" 2>/dev/null || true
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait
    rm -rf "$dir" "/dev/shm/gcoalesce-$(id -u)-$GCOALESCE_INSTANCE-"*
}
trap clean_up EXIT

exec 3< <(exec "$build/cli/gcoalesce" sim)
pids+=($!)
read -r _ _ sim <&3 # "listening on URL"
"$build/broker/gcoalesced" --upstream "$sim" --memory 16MiB --retries 0 --log-level error &
pids+=($!)

# Two free ports: the gateway's, which it comes back to, and the page's, which it must know as an origin.
ports=$(node -e '
    const net = require("net");
    const [a, b] = [net.createServer(), net.createServer()];
    a.listen(0, "127.0.0.1", () => b.listen(0, "127.0.0.1", () => {
        console.log(a.address().port, b.address().port);
        a.close();
        b.close();
    }));')
read -r port page <<<"$ports"
cat >"$dir/gateway" <<END
#!/bin/bash
if [ -e "$dir/gateway.pid" ]; then
    old=\$(cat "$dir/gateway.pid")
    kill -KILL "\$old"
    # Until its end it has the port. Perhaps nobody takes notice of it then, and it stays a zombie.
    for _ in {1..1500}; do
        state=\$(sed 's/.*) //; s/ .*//' "/proc/\$old/stat" 2>/dev/null) && [ "\$state" != Z ] || break
        sleep 0.02
    done
fi
"$build/cli/gcoalesce" serve --listen 127.0.0.1:$port --cors-origin http://127.0.0.1:$page \\
    >/dev/null 2>>"$dir/log" </dev/null &
echo \$! >"$dir/gateway.pid"
END
chmod +x "$dir/gateway"
"$dir/gateway"
until node -e "fetch('http://127.0.0.1:$port/readyz').then((r) => process.exit(r.ok ? 0 : 1), () => process.exit(1))"; do
    kill -0 "${pids[1]}"
    sleep 0.05
done
node "$here/browser.mjs" chromium "http://127.0.0.1:$port" "$dir/gateway" "$page" "$sim" || {
    cat "$dir/log"
    exit 1
}
