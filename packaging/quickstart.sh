#!/bin/bash
# On a bare Debian 12: installs what is missing, builds, and shows what gcoalesce is for.
# usage: packaging/quickstart.sh ["PROMPT"]
# Nine processes ask PROMPT at once. With GEMINI_API_KEY set the real Gemini answers, once; without it a local
# stand-in does. The answer goes to standard output, everything else to standard error. Nothing is left running.
set -euo pipefail
cd "$(dirname "$0")/.."

prompt=${1:-Why is the sky blue?}
model=${GCOALESCE_MODEL:-gemini-2.5-flash}
others=8
cli=build/release/cli/gcoalesce
broker=build/release/broker/gcoalesced

say() { printf '%s\n' "$*" >&2; }

say "[1/3] packages"
packaging/deps.sh build

say "[2/3] build (some minutes the first time)"
log=/dev/stderr
if [ ! -t 2 ]; then
    mkdir -p build
    log=build/quickstart.log
fi
packaging/build.sh release -DGCOALESCE_TESTS=OFF -- gcoalesce gcoalesced >"$log" 2>&1 </dev/null || {
    [ "$log" = /dev/stderr ] || tail -n 40 "$log" >&2
    exit 1
}

say "[3/3] $((others + 1)) processes ask at once: $prompt"
unset "${!GCOALESCE_@}"
dir=$(mktemp -d)
export GCOALESCE_RUNTIME_DIR=$dir GCOALESCE_INSTANCE=quickstart-$$
started=()
clean_up() {
    [ ${#started[@]} -eq 0 ] || kill "${started[@]}" 2>/dev/null || true
    wait
    rm -rf "$dir" "/dev/shm/gcoalesce-$(id -u)-$GCOALESCE_INSTANCE-"*
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

upstream=()
if [ -z "${GEMINI_API_KEY:-}" ]; then
    say "      (GEMINI_API_KEY is not set: a local stand-in for Gemini answers)"
    exec 3< <(exec "$cli" sim --latency 500ms --events 24 --gap 60ms)
    started+=($!)
    read -r _ _ url <&3 # "listening on URL"
    upstream=(--upstream "$url")
fi
GEMINI_API_KEY=${GEMINI_API_KEY:-none} "$broker" "${upstream[@]}" --memory 16MiB --streams 64 --log-level warning >&2 &
started+=($!)
unset GEMINI_API_KEY # from here on only the broker has it

# As the sender of a push notification would: answers stay fresh a little longer now.
until "$cli" notify on --for 10s >/dev/null 2>"$dir/trouble"; do
    kill -0 "${started[-1]}" 2>/dev/null || exit 1 # it has said why
    sleep 0.1
done

say
asks=()
for i in $(seq "$others"); do
    "$cli" ask --status -m "$model" "$prompt" </dev/null >"$dir/answer.$i" 2>"$dir/status.$i" &
    asks+=($!)
done
failed=0
"$cli" ask --status -m "$model" "$prompt" </dev/null 2>"$dir/status.0" || failed=$?
for pid in "${asks[@]}"; do
    wait "$pid" || failed=$?
done
[ -t 1 ] || echo
if [ "$failed" -ne 0 ]; then
    sort -u "$dir"/status.* >&2
    exit "$failed"
fi

calls=$("$cli" stats --json | sed -E 's/.*"upstream_calls":\{"value":([0-9]+).*/\1/')
answers=$(sha256sum "$dir"/answer.* | cut -d ' ' -f 1 | sort -u | wc -l)
say
say "how each was served:"
sort "$dir"/status.* | sed 's/^gcoalesce: /  /; s/; tokens.*//' >&2
say
if [ "$calls" -ne 1 ] || [ "$answers" -ne 1 ]; then
    say "expected one upstream call and one answer for all; found $calls calls and $answers different answers"
    exit 1
fi
say "$((others + 1)) requests, 1 upstream call, the same answer for everyone."
say "Next: $cli demo (100 requests from 8 processes), tests/run.sh, README.md."
